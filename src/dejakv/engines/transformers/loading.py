"""Finds and loads a model with its tokenizer or processor. Every way this can fail names its remedy."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import logging

from dejakv.engines.transformers.capabilities import ATTENTION
from dejakv.errors import ConfigError, ModelError
from dejakv.models import resolve
from dejakv.models.gguf import SUFFIX, load_gguf
from dejakv.models.lckv import register

_OPTIONAL = ("video_processor", "audio_tokenizer")


def load_processor(where: str, trust_remote_code: bool = False) -> Any:
    """The model's own processor. Video processors of transformers need torchvision; without it the same processor is
    put together from its tokenizer and its picture part. Raises: whatever loading raises if that does not help."""
    try:
        return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (ImportError, OSError) as error:
        if "video" not in str(error).lower() and "torchvision" not in str(error).lower():
            raise
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        if type(config) not in PROCESSOR_MAPPING:
            raise
        kind: Any = PROCESSOR_MAPPING[type(config)]
        settings, _ = kind.get_processor_dict(where)
        accepted = inspect.signature(kind.__init__).parameters
        own = {name: value for name, value in settings.items() if name in accepted and not name.endswith("_processor")}
        return pictures_only(
            kind,
            image_processor=AutoImageProcessor.from_pretrained(where, trust_remote_code=trust_remote_code),
            tokenizer=AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code),
            **own,
        )


def pictures_only(kind: Any, **parts: Any) -> Any:
    """A processor of class `kind` whose video part is absent."""

    class PicturesOnly(kind):
        video_processor = None

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name not in _OPTIONAL]

    PicturesOnly.__name__ = kind.__name__
    absent = {name: None for name in _OPTIONAL if name in inspect.signature(kind.__init__).parameters}
    return PicturesOnly(**{**absent, **parts})


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(name: str, dtype: str, device: str, attn: str, trust_remote_code: bool) -> tuple[Any, Any, Any]:
    """Returns a model in evaluation mode on its device, its tokenizer, and its processor if it takes pictures, else None.

    Raises: ConfigError for a wrong option, ModelError for a model that is missing, damaged or of no known kind.
    """
    if attn not in ATTENTION:
        raise ConfigError(f"attn={attn!r} cannot continue from stored state: choose {' or '.join(ATTENTION)}")
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown: choose auto, {', '.join(DTYPES)}")
    found = resolve(name)
    place = _device(device)
    if isinstance(found, Path) and found.suffix == SUFFIX:
        model, tokenizer = load_gguf(found, dtype=DTYPES.get(dtype, dtype), attn_implementation=attn)
        return model.to(place), tokenizer, None
    where = str(found)
    if Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise ModelError(f"{where} holds no config.json: give the folder of a Hugging Face model, or its hub id")
    register()
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
        if not images and not _causal(config):
            raise ModelError(_unknown_kind(where, config))
        with no_bars():
            model = kind.from_pretrained(
                where,
                dtype="auto" if dtype == "auto" else DTYPES[dtype],
                attn_implementation=attn,
                trust_remote_code=trust_remote_code,
            )
        processor = load_processor(where, trust_remote_code) if images else None
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SyntaxError, SafetensorError) as error:
        raise ModelError(
            f"model {name!r} cannot be loaded ({type(error).__name__}: {error}): give a bundled name, the folder of a "
            "Hugging Face model or its hub id (with a network, or already downloaded)"
        ) from error
    return model.eval().to(place), tokenizer, processor if hasattr(processor, "image_processor") else None


@contextmanager
def no_bars() -> Generator[None]:
    """transformers' own bar over the weights would stand in the middle of a command's output."""
    were = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were:
            logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown: choose auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no GPU: choose cpu, or install torch with CUDA")
    return device


def _causal(config: Any) -> bool:
    """Whether transformers, this package or the checkpoint's own code has a causal language model for it."""
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _unknown_kind(where: str, config: Any) -> str:
    message = f"{where} is of type {config.model_type!r}, which is neither a causal language model nor an image-text model of transformers"
    if "internvl" in str(config.model_type).lower():
        return f"{message}: take the conversion to transformers' own InternVL, whose name ends in -HF"
    return f"{message}: choose a model of AutoModelForCausalLM or AutoModelForImageTextToText"
