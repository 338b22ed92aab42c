"""GGUF files: transformers reads them into an ordinary model with dequantized weights."""

import importlib.util
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from dejakv.errors import MissingExtraError, ModelError, is_out_of_memory

SUFFIX = ".gguf"
FAMILIES = "Llama, Qwen and Mistral"


def load_gguf(file: Path, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file: float32 unless `dtype` is given. `options` go to `from_pretrained`.

    The model's configuration does not mention the quantization: its weights are plain tensors, and its state depends only
    on them. Raises: MissingExtraError without the packages that read GGUF; ModelError for a file that is not GGUF, is
    truncated or altered, or has a model of an unknown family.
    """
    tokenizer = load_gguf_tokenizer(file)
    return load_gguf_model(file, **options), tokenizer


def load_gguf_model(file: Path, **options: Any) -> Any:
    """The model of `load_gguf` alone."""
    import torch
    from transformers import AutoModelForCausalLM

    if options.get("dtype", "auto") == "auto":
        options["dtype"] = torch.float32
    model = _read(AutoModelForCausalLM, file, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for trace in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(trace, None)
    return model.eval()


def load_gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file. Raises: as `load_gguf`."""
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, file)


def _read(kind: Any, file: Path, **options: Any) -> Any:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf", "reading a GGUF file")
    try:
        with redirect_stderr(StringIO()):  # transformers draws a progress bar that none of its settings turns off
            return kind.from_pretrained(file.parent, gguf_file=file.name, **options)
    except Exception as error:  # truncated, altered, unknown and too large files raise a dozen kinds
        if is_out_of_memory(error):
            raise ModelError(
                f"too little memory to read {file.name}: its weights take four bytes each; close other programs, or use a "
                "smaller model"
            ) from error
        raise ModelError(
            f"the GGUF file {file.name} cannot be read ({type(error).__name__}: {error}): give a complete file of a model of "
            f"the {FAMILIES} families"
        ) from error
