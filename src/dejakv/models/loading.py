"""Meaning of a `--model` value, a name or a path, and loading the model with transformers."""

import difflib
import inspect
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dejakv import plugins
from dejakv.errors import ConfigError, ModelError
from dejakv.models.gguf import SUFFIX, is_gguf, load_gguf, load_gguf_tokenizer
from dejakv.models.table import RECIPES, list_choices, names, path, tokenizer_folder

CONNECT_SECONDS = 5.0
_OPTIONAL = ("video_processor", "audio_tokenizer")


def resolve(name_or_path: str | Path) -> Path | str:
    """Find the source of a model.

    For a hub id the hub is looked for (`without_network`), which takes at most 5 seconds.

    Parameters
    ----------
    name_or_path : str or Path
        A bundled or fetched name, a local folder, a GGUF file or a hub id.

    Returns
    -------
    Path or str
        The path; for anything that is no path here, the hub id.

    Raises
    ------
    MissingExtraError
        For a bundled name without `dejakv-models`.
    ModelError
        For a damaged model, one that is not fetched yet (naming the command), a folder without
        config.json, a path that does not exist, and a name that looks like a misspelled one of this
        package.
    """
    # Names go first: a folder of the same name in the working directory does not hide a model.
    text = str(name_or_path)
    if text in names():
        return path(text)

    choice = list_choices()
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(
                f"{text} is a folder without config.json: give the folder of a checkpoint, or "
                f"{choice}"
            )

        return local

    if local.suffix == SUFFIX and local.is_file():
        return local
    # A hub id begins in none of these ways, and has one slash at most.
    is_path = (
        isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    )
    if is_path or local.suffix == SUFFIX:
        raise ModelError(
            f"no checkpoint at {text}: give an existing folder or GGUF file, a hub id, or {choice}"
        )

    if not text.strip():
        raise ModelError(f"the model's name is empty: give a folder, a hub id, or {choice}")
    # A misspelled bundled name is no hub id: say so before any download.
    if "/" not in text and difflib.get_close_matches(text.lower(), names(), n=1, cutoff=0.6):
        raise ModelError(f"unknown model {text!r}: choose {choice}, a folder, or a hub id")
    # Before transformers looks for the hub: without it, each of its requests takes long.
    without_network()
    return text


def load(name_or_path: str | Path, **options: Any) -> tuple[Any, Any]:
    """Load a model and its processor, which for a text model is a tokenizer.

    Parameters
    ----------
    name_or_path : str or Path
        A bundled or fetched name, a local folder, a GGUF file or a hub id.
    options : Any
        Passed to `from_pretrained` of the model (dtype, attn_implementation, trust_remote_code,
        ...). Without them the weights stay in the checkpoint's own type on the CPU.

    Returns
    -------
    tuple[Any, Any]
        Model and processor.

    Raises
    ------
    MissingExtraError
        For a bundled name without `dejakv-models`, and a GGUF file without the packages that read
        it.
    ModelError
        If the name is unknown, files are missing, the weights cannot be read, or the model is
        neither a causal language model nor an image-text model.
    """
    from safetensors import SafetensorError
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    model_source = resolve(name_or_path)
    if is_gguf(model_source):
        return load_gguf(model_source, **options)
    where, trusted = str(model_source), bool(options.get("trust_remote_code", False))

    # Before the configuration is read: transformers does not know these types.
    unregistered = _register_types()
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trusted)
        images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if not images and not _causal(config):
            raise ModelError(_unknown_kind(where, config))
        kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
        with no_bars():
            model = kind.from_pretrained(where, **options)

        if images:
            return model.eval(), load_processor(where, trusted)
        return model.eval(), AutoTokenizer.from_pretrained(where, trust_remote_code=trusted)
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        ImportError,
        RuntimeError,
        SyntaxError,
        SafetensorError,
    ) as error:
        # Only of a hub id: for a folder, the error itself says more.
        hub_unreachable = (
            isinstance(model_source, str) and isinstance(error, OSError) and without_network()
        )
        why = (
            "the hub cannot be reached, and its cache has no such model"
            if hub_unreachable
            else "; ".join((f"{type(error).__name__}: {error}", *unregistered))
        )
        raise ModelError(
            f"model {str(name_or_path)!r} does not load ({why}): give a complete checkpoint "
            "folder, a hub id "
            f"that can be reached from here, or a model of this package ({', '.join(names())})"
        ) from error


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model, without its weights.

    Parameters
    ----------
    name_or_path : str or Path
        As of `resolve`.
    trust_remote_code : bool
        Whether the model's repository may run code of its own.

    Returns
    -------
    PreTrainedTokenizer
        The tokenizer.

    Raises
    ------
    ModelError
        For a model that is not there, or without a tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    # These ship with the package, also for models that were never fetched.
    if name_or_path in RECIPES:
        return AutoTokenizer.from_pretrained(tokenizer_folder(str(name_or_path)))
    source = resolve(name_or_path)
    if is_gguf(source):
        return load_gguf_tokenizer(source)

    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(name_or_path)!r} has no tokenizer that can be loaded ({error}): give another"
            " model"
        ) from error


def _register_types() -> list[str]:
    """Make the types of models of all packages known to transformers; say which are not."""
    failures: list[str] = []
    for model_type in plugins.names(plugins.MODEL_TYPES):
        # A missing package costs the models of its type alone.
        try:
            plugins.load(plugins.MODEL_TYPES, model_type).register()
        except ConfigError as error:
            failures.append(str(error))
    return failures


def load_processor(where: str, trust_remote_code: bool = False) -> Any:
    """Load the model's own processor.

    Video processors of transformers need torchvision. Without it the same processor is put together
    from its tokenizer and its picture part. If that does not help, the error of loading is raised.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (ImportError, OSError) as error:
        # The error is not about the missing video part.
        if "video" not in str(error).lower() and "torchvision" not in str(error).lower():
            raise

        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        if type(config) not in PROCESSOR_MAPPING:
            raise
        # As `from_pretrained` does it, part by part, without the video part.
        kind: Any = PROCESSOR_MAPPING[type(config)]
        settings, _ = kind.get_processor_dict(where)
        accepted = inspect.signature(kind.__init__).parameters
        processor_options = {
            name: value
            for name, value in settings.items()
            if name in accepted and not name.endswith("_processor")
        }
        return pictures_only(
            kind,
            image_processor=AutoImageProcessor.from_pretrained(
                where, trust_remote_code=trust_remote_code
            ),
            tokenizer=AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code),
            **processor_options,
        )


def pictures_only(kind: Any, **parts: Any) -> Any:
    """Make a processor of class `kind` whose video part is absent."""

    class PicturesOnly(kind):
        video_processor = None

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name not in _OPTIONAL]

    PicturesOnly.__name__ = kind.__name__
    absent = {
        name: None for name in _OPTIONAL if name in inspect.signature(kind.__init__).parameters
    }
    return PicturesOnly(**{**absent, **parts})


@cache
def without_network() -> bool:
    """Return whether only the hub's cache on this machine can be read.

    That is so if HF_HUB_OFFLINE is set, or if the hub cannot be reached, in which case the client
    is set to be offline. With a proxy the hub is taken as reachable.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not getproxies():
        address = urlsplit(constants.ENDPOINT)
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
        except OSError:
            # Or every file would wait for a connection of its own.
            constants.HF_HUB_OFFLINE = True

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def no_bars() -> Generator[None]:
    """Hide transformers' progress bar of the weights, which would interrupt a command's output."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _causal(config: Any) -> bool:
    """Return whether transformers, this package or the checkpoint has a causal language model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    is_registered = (
        config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return is_registered or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _unknown_kind(where: str, config: Any) -> str:
    message = (
        f"{where} is of type {config.model_type!r}, which is neither a causal language model nor "
        "an image-text model of transformers"
    )
    if "internvl" in str(config.model_type).lower():
        return (
            f"{message}: take the conversion to transformers' own InternVL, whose name ends in -HF"
        )

    return f"{message}: choose a model of AutoModelForCausalLM or AutoModelForImageTextToText"
