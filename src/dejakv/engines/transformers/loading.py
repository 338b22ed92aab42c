"""Loads a model with its tokenizer or processor for an engine. Every error names its remedy."""

from typing import Any

import torch

from dejakv.engines.transformers.capabilities import ATTENTION
from dejakv.errors import ConfigError
from dejakv.models import load as load_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(
    name: str, dtype: str, device: str, attn: str, trust_remote_code: bool
) -> tuple[Any, Any, Any]:
    """Load a model in evaluation mode on its device.

    Returns
    -------
    tuple[Any, Any, Any]
        The model, its tokenizer, and its processor if it takes pictures, else None.

    Raises
    ------
    ConfigError
        An option is wrong.
    ModelError
        The model is missing, damaged or of no known kind.
    """
    if attn not in ATTENTION:
        raise ConfigError(
            f"attn={attn!r} cannot continue from stored state: choose {' or '.join(ATTENTION)}"
        )
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown: choose auto, {', '.join(DTYPES)}")
    # Before the load, which takes long: a wrong name fails at once.
    place = _device(device)
    # transformers takes sdpa for itself where a model has it, and refuses the name where it has
    # none (Mamba).
    attention = None if attn == "sdpa" else attn
    model, processor = load_model(
        name,
        dtype=DTYPES.get(dtype, dtype),
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )

    if hasattr(processor, "image_processor"):
        return model.to(place), processor.tokenizer, processor
    return model.to(place), processor, None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name!r} is unknown: choose auto, cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}, but torch sees no GPU: choose cpu, or install torch with CUDA"
        )
    return device
