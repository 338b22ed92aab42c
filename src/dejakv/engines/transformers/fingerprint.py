"""Fingerprints: of a model in memory, of its tokenizer and processor, and of a model folder on disk.

Everything that makes the same tokens give another state must change the epoch.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from dejakv.errors import ModelError
from dejakv.identity import digest_of, epoch_of

LAYOUT = 1
WHOLE_BYTES = 256 * 1024**2
_PAGE, _PAGES = 4096, 16


def model_epoch(model: Any, tokenizer: Any, processor: Any, attention: str) -> str:
    """32 hexadecimal digits for a loaded model: weights and adapters as they are in memory now, tokenizer, processor,
    dtype, attention implementation and the layout of the KV that this package stores."""
    return epoch_of(
        {
            "layout": LAYOUT,
            "transformers": transformers.__version__.split(".")[0],
            "class": type(model).__name__,
            "config": _config(model.config),
            "weights": weights_digest((name, tensor) for name, tensor in _tensors(model)),
            "adapters": _adapters(model),
            "dtype": str(model.dtype),
            "attention": attention,
            "tokenizer": tokenizer_digest(tokenizer),
            "processor": processor_digest(processor),
        }
    )


def encoder_epoch(model: Any, processor: Any, attention: str) -> str:
    """The same for what makes a picture's features: whatever is not the language model."""
    outside = (
        (name, tensor) for name, tensor in _tensors(model) if "language_model" not in name and "lm_head" not in name
    )
    return epoch_of(
        {
            "layout": LAYOUT,
            "transformers": transformers.__version__.split(".")[0],
            "class": type(model).__name__,
            "config": _config(model.config),
            "weights": weights_digest(outside),
            "adapters": _adapters(model),
            "dtype": str(model.dtype),
            "attention": attention,
            "processor": processor_digest(processor),
        }
    )


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]], whole_bytes: int = WHOLE_BYTES) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of tensors.

    Models above `whole_bytes` are sampled: 16 pages of 4 KiB from every tensor, spread evenly, so that another
    fine-tune or a merged adapter is seen, but one weight edited in place may not be. A second for 7 billion weights.
    """
    listed = sorted(tensors, key=lambda item: item[0])
    sample = sum(tensor.numel() * tensor.element_size() for _, tensor in listed) > whole_bytes
    sha = hashlib.sha256()
    for name, tensor in listed:
        sha.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        if tensor.device.type == "meta" or tensor.numel() == 0:
            continue
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if sample and flat.numel() > _PAGE * _PAGES:
            step = (flat.numel() - _PAGE) // (_PAGES - 1)
            flat = torch.cat([flat[step * page : step * page + _PAGE] for page in range(_PAGES)])
        data: Any = flat.cpu().numpy()
        sha.update(data)
    return sha.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Vocabulary, special tokens, splitting rules and chat template."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return digest_of(rules, str(tokenizer.special_tokens_map), json.dumps(template, sort_keys=True, default=str))


def processor_digest(processor: Any) -> str:
    """How pictures are cut, scaled and counted."""
    parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor")]
    settings = [part.to_dict() for part in parts if part is not None]
    own = (
        {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str | bool)}
        if processor
        else {}
    )
    return digest_of(json.dumps([settings, own], sort_keys=True, default=str)) if processor is not None else ""


def weights_stamp(model: Any) -> tuple[object, ...]:
    """Cheap: differs when a parameter was replaced or changed in place, or another adapter became active."""
    parts: list[object] = [model.training]
    for parameter in model.parameters():
        parts += [parameter.data_ptr(), parameter._version]
    for module in model.modules():
        active = getattr(module, "active_adapters", None)
        if active is not None and not callable(active):
            parts += [tuple(active), bool(getattr(module, "disable_adapters", False))]
    return tuple(parts)


def folder_epoch(path: str | Path) -> str:
    """32 hexadecimal digits for a model folder without loading it: under a second for 7 billion weights.

    Small files (configuration, tokenizer, processor, code) count with every byte. Of larger ones count size, time of
    change in nanoseconds, the safetensors header and 16 pages spread over the file. Raises: ModelError if there is no
    such folder or it holds no config.json.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json: give the folder of a Hugging Face model, or its hub id")
    files = sorted(item for item in folder.rglob("*") if item.is_file() and not _hidden(item.relative_to(folder)))
    return digest_of(*(part for item in files for part in (item.relative_to(folder).as_posix(), _file_digest(item))))[
        :32
    ]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_digest(path: Path, whole: int = 32 * 1024**2) -> str:
    status = path.stat()
    if status.st_size <= whole:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    sha = hashlib.sha256(f"{status.st_size}:{status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            sha.update(file.read(min(length, whole)))
        step = (status.st_size - _PAGE) // (_PAGES - 1)
        for page in range(_PAGES):
            file.seek(step * page)
            sha.update(file.read(_PAGE))
    return sha.hexdigest()


def _tensors(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=True)
    yield from model.named_buffers(remove_duplicate=True)


def _config(config: Any) -> Any:
    """The configuration without what says nothing of the state: where it was loaded from, by which version."""
    ignored = {"_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype", "dtype"}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items() if name not in ignored}
        return value

    return plain(config.to_dict())


def _adapters(model: Any) -> list[str]:
    """Names of the active adapters (PEFT); their weights are among the model's parameters."""
    found: set[str] = set()
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if active is not None and not callable(active):
            off = " off" if getattr(module, "disable_adapters", False) is True else ""
            found.add(f"{name}:{active}{off}")
    return sorted(found)
