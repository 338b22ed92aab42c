"""The epoch of a vLLM server: a fingerprint of everything that makes equal tokens give equal state.

Weights are hashed by content. A file of a Hugging Face cache is named after its SHA-256 already, so a hub model costs
nothing; a local folder is read once at start (about as long as loading it).
"""

import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejakv.engines.vllm import compat
from dejakv.engines.vllm.ranks import rank_count
from dejakv.identity import digest_of, epoch_of

log = logging.getLogger("dejakv.vllm")

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def folder_fingerprint(folder: Path, patterns: tuple[str, ...] = (*WEIGHTS, "*.json")) -> str | None:
    """SHA-256 over names and contents of a folder's files; None if there are none."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    if not any(path.match(pattern) for pattern in WEIGHTS for path in files):
        return None
    return digest_of(*(part for path in files for part in (path.name, _content(path))))


def weights_fingerprint(model: str, revision: str | None, load_format: str, seed: int | None) -> str:
    """What the model's weights are. Weights that cannot be found on disk get a name of their own for this process:
    nothing of them is found again after a restart, which is safe, and said in the log."""
    if load_format == "dummy":
        return f"dummy:{seed}"
    folder = model_folder(model, revision)
    found = folder_fingerprint(folder) if folder else None
    if found is None:
        log.warning("no weight files of %s were found to fingerprint: its KV will not be found after a restart", model)
        return f"unknown:{secrets.token_hex(16)}"
    return found


def server_epoch(vllm_config: Any) -> str:
    """The epoch of a server without adapters, 32 hexadecimal digits."""
    model = vllm_config.model_config
    parts: Mapping[str, object] = {
        "engine": "vllm",
        "version": compat.vllm_version(),
        "weights": weights_fingerprint(
            str(model.model), model.revision, str(vllm_config.load_config.load_format), model.seed
        ),
        "config": model.hf_config.to_json_string(use_diff=False),
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "device": compat.device_name(),
        "attention": compat.attention_backend(vllm_config),
        "batch_invariant": compat.is_batch_invariant(),
        "quantization": str(model.quantization),
        "layout": "2,layers,kv_heads,tokens,head_dim",
        "tensor_parallel": rank_count(vllm_config),  # other heads in a chunk, and sums in another order
    }
    return epoch_of(parts)


def _content(path: Path) -> str:
    name = path.resolve().name
    if _SHA256.fullmatch(name):
        return name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_folder(model: str, revision: str | None) -> Path | None:
    """Where a model's files lie on this disk: the folder itself, or a hub model's snapshot; None if they do not."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
