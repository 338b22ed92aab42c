"""GGUF files: transformers reads them into an ordinary model with dequantized weights."""

import importlib.util
import mmap
import struct
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, TypeGuard

from dejakv.errors import MissingExtraError, ModelError, is_out_of_memory

SUFFIX = ".gguf"
FAMILIES = "Llama, Qwen and Mistral"
_WIDTHS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_BEGIN_WITH_BOS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
}
"""Pre-tokenizers of BPE for which llama.cpp adds the first token where a file does not say."""


def is_gguf(source: Path | str) -> TypeGuard[Path]:
    """Return whether a model's source is a GGUF file: a path with its suffix, and no hub name."""
    return isinstance(source, Path) and source.suffix == SUFFIX


def load_gguf(file: Path, **options: Any) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a GGUF file.

    The model's configuration does not mention the quantization: its weights are plain tensors, and
    its state depends only on them.

    Parameters
    ----------
    file : Path
        The GGUF file.
    options : Any
        Passed to `from_pretrained` of the model. Without `dtype` the weights are float32.

    Returns
    -------
    tuple[Any, Any]
        Model and tokenizer.

    Raises
    ------
    MissingExtraError
        Without the packages that read GGUF.
    ModelError
        For a file that is not GGUF, is truncated or altered, or has a model of an unknown family.
    """
    tokenizer = load_gguf_tokenizer(file)
    return load_gguf_model(file, **options), tokenizer


def load_gguf_model(file: Path, **options: Any) -> Any:
    """Load the model of a GGUF file alone, as `load_gguf` does."""
    import torch
    from transformers import AutoModelForCausalLM

    # The file's weights are quantized: it has no dtype to take over.
    if options.get("dtype", "auto") == "auto":
        options["dtype"] = torch.float32
    model = _read(
        file,
        lambda: AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # What transformers leaves on a model that it takes for a quantized one.
    for trace in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(trace, None)
    return model.eval()


def load_gguf_tokenizer(file: Path) -> Any:
    """Load the tokenizer of a GGUF file, which adds the tokens that llama.cpp adds to a text.

    Raises as `load_gguf` does.
    """
    from transformers import AutoTokenizer

    def read() -> Any:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        metadata = _metadata(file)
        begins = metadata.get("model") == "llama" or metadata.get("pre") in _BEGIN_WITH_BOS
        tokenizer.add_bos_token = bool(metadata.get("add_bos_token", begins))
        tokenizer.add_eos_token = bool(metadata.get("add_eos_token", False))
        return tokenizer

    return _read(file, read)


def _metadata(file: Path) -> dict[str, Any]:
    """Read a file's metadata about its tokenizer, without arrays.

    Transformers reads less of it, and the package `gguf` takes seconds.
    """
    values: dict[str, Any] = {}
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Behind the magic, the version and the number of tensors.
        offset = 16

        def read(format: str) -> Any:
            nonlocal offset
            (value,) = struct.unpack_from(f"<{format}", data, offset)
            offset += struct.calcsize(f"<{format}")
            return value

        def text() -> bytes:
            return read(f"{read('Q')}s")

        for _ in range(read("Q")):
            name, kind = text().decode(), read("I")
            if kind == _ARRAY:
                # Arrays are skipped, but texts in them have lengths of their own.
                of, count = read("I"), read("Q")
                for _ in range(count if of == _TEXT else 0):
                    offset += 8 + struct.unpack_from("<Q", data, offset)[0]
                offset += 0 if of == _TEXT else count * struct.calcsize(_WIDTHS[of])
            else:
                values[name.removeprefix("tokenizer.ggml.")] = (
                    text().decode() if kind == _TEXT else read(_WIDTHS[kind])
                )

    return values


def _read(file: Path, read: Callable[[], Any]) -> Any:
    # Looked for beforehand: transformers' own errors name no extra of ours.
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf", "reading a GGUF file")
    try:
        # transformers draws a progress bar that none of its settings turns off.
        with redirect_stderr(StringIO()):
            return read()
    except Exception as error:
        # Truncated, altered, unknown and too large files raise a dozen kinds.
        if is_out_of_memory(error):
            raise ModelError(
                f"too little memory to read {file.name}: its weights take four bytes each; close "
                "other programs, or use a "
                "smaller model"
            ) from error
        raise ModelError(
            f"the GGUF file {file.name} cannot be read ({type(error).__name__}: {error}): give a "
            "complete file of a model of "
            f"the {FAMILIES} families"
        ) from error
