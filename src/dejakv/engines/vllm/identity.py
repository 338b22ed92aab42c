"""Identities that DejaKV keys by, from a vLLM server and its requests: epoch, partition, media.

Weights are hashed by content. A weight file of a Hugging Face cache is named after its SHA-256
already, so a hub model costs nothing. A local folder is read once at the start (about as long as
loading it). What a client can choose never decides a partition or a medium.

A vLLM worker reads a LoRA adapter's files once, when its `lora_int_id` is first used, and again
after the adapter was evicted or loaded in place. It tells nobody what it read, and an id is the
client's or the API server's choice. So an adapter's state is shared only as long as its files are
what they were when the server started and its id has stood for one folder. Anything else is
answered without reuse, with the reason.
"""

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejakv.engines.base import Prepared
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.ranks import rank_count
from dejakv.identity import MediumSpan, digest_of, epoch_of
from dejakv.request import DEFAULT_PARTITION, Request

log = logging.getLogger("dejakv.vllm")

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
FROM_FILES = frozenset(
    (
        "auto bitsandbytes fastsafetensors gguf hf instanttensor mistral npcache pt runai_streamer "
        "safetensors sharded_state"
    ).split()
)
"""Load formats of vLLM that read the weights from the model's own folder."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def folder_fingerprint(folder: Path) -> str | None:
    """Hash names and contents of a folder's files; None if it has no weights."""
    # Sorted, since the order of a listing is no part of the content.
    files = sorted(
        {
            path
            for pattern in (*WEIGHTS, "*.json")
            for path in folder.glob(pattern)
            if path.is_file()
        }
    )

    if not any(path.match(pattern) for pattern in WEIGHTS for path in files):
        return None

    return digest_of(*(part for path in files for part in (path.name, _content(path))))


def weights_fingerprint(
    model: str,
    revision: str | None,
    load_format: str,
    seed: int | None,
    download_dir: str | None = None,
) -> str:
    """Return the fingerprint of a model's weights.

    Weights that are not on disk, or come from elsewhere than the model's folder, get a random
    fingerprint for this process. Then none of their state is found after a restart, and the log
    says so.

    Parameters
    ----------
    model : str
        Folder, or name on the hub.
    revision : str or None
        Revision on the hub.
    load_format : str
        vLLM's `--load-format`, which says where weights come from.
    seed : int or None
        Seed from which vLLM draws dummy weights.
    download_dir : str or None
        Folder of downloads; None for the default.
    """
    # vLLM draws dummy weights from the seed, so that names them.
    if load_format == "dummy":
        return f"dummy:{seed}"

    folder = model_folder(model, revision, download_dir) if load_format in FROM_FILES else None

    fingerprint = folder_fingerprint(folder) if folder else None
    if fingerprint is None:
        log.warning(
            "no weight files of %s (load format %s) were found to fingerprint: its KV will not be "
            "found after a restart",
            model,
            load_format,
        )
        return f"unknown:{secrets.token_hex(16)}"
    return fingerprint


def server_epoch(vllm_config: Any, kv_cache_config: Any = None) -> str:
    """Return the epoch of a server without adapters, 32 hexadecimal digits.

    Parameters
    ----------
    vllm_config : VllmConfig
        All settings of the server.
    kv_cache_config : KVCacheConfig or None
        Layout of the KV cache, which the epoch covers if it is given.
    """
    model = vllm_config.model_config
    # Everything that can change a value of the state or the layout of its bytes. Tensor
    # parallelism does both: other heads in a part, and sums in another order.
    parts: dict[str, object] = {
        "engine": "vllm",
        "version": upstream.vllm_version(),
        **_describe(model, vllm_config.load_config),
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "device": upstream.device_name(),
        "attention": upstream.attention_backend(vllm_config),
        **upstream.recurrent_kernels(vllm_config, kv_cache_config),
        "batch_invariant": upstream.is_batch_invariant(),
        "pages": [] if kv_cache_config is None else upstream.page_layout(kv_cache_config),
        "tensor_parallel": rank_count(vllm_config),
    }
    draft = upstream.draft_model_config(vllm_config)
    if draft is not None:
        # Its layers' state is in the same pages. How many tokens it drafts changes none of it.
        parts["draft"] = {
            "method": str(vllm_config.speculative_config.method),
            **_describe(draft, upstream.draft_load_config(vllm_config)),
        }
    return epoch_of(parts)


def _describe(model: Any, load: Any) -> dict[str, object]:
    """Describe a model by the content of its weights and its configuration."""
    return {
        "weights": weights_fingerprint(
            str(model.model), model.revision, str(load.load_format), model.seed, load.download_dir
        ),
        "config": model.hf_config.to_json_string(use_diff=False),
        "quantization": str(model.quantization),
    }


def _content(path: Path) -> str:
    name = path.resolve().name
    # In a Hugging Face cache a weight file's blob is named after its SHA-256.
    if _SHA256.fullmatch(name):
        return name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_folder(model: str, revision: str | None, download_dir: str | None = None) -> Path | None:
    """Find a model's files on this disk.

    Returns
    -------
    Path or None
        The folder itself, or the snapshot of a hub model. None if the files are not here, or are
        another hub's.
    """
    if Path(model).is_dir():
        return Path(model)
    if upstream.is_from_modelscope():
        return None

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def partition_of(cache_salt: str | None) -> str:
    """Return the tenant behind a `cache_salt`, by digest, since the salt may be a secret."""
    return (
        DEFAULT_PARTITION if not cache_salt else "salt-" + digest_of("cache_salt", cache_salt)[:32]
    )


def media_digest(item: Any) -> str:
    """Hash a processed medium, that is, the tensors for the encoder.

    vLLM's own identifier is not used. A client may choose it (`uuid`), and two media under one uuid
    must not be taken for one another.

    Raises
    ------
    AnonymousMedia
        The medium has no tensor, such as a place in shared memory (`--mm-processor-cache-type
        shm`), or holds an unknown type.
    """
    sha = hashlib.sha256()
    if not sum([_update(sha, name, item[name].data) for name in sorted(item)]):
        raise AnonymousMedia(_AWAY)
    return sha.hexdigest()


def _update(sha: Any, name: str, value: Any) -> int:
    """Add a value to the digest; return the number of its tensors."""
    if isinstance(value, list | tuple):
        return sum([_update(sha, f"{name}[{index}]", part) for index, part in enumerate(value)])
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))

    if isinstance(value, torch.Tensor):
        header = f"{name}|{value.dtype}|{tuple(value.shape)}"
        flat = value.detach().cpu().contiguous().flatten()
        # As bytes, since NumPy has no bfloat16.
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    elif isinstance(value, bool | int | float | str | None):
        data = np.frombuffer(repr(value).encode(), np.uint8)
        header = f"{name}|{type(value).__name__}"
    else:
        raise AnonymousMedia(
            f"a medium has {name} of type {type(value).__name__}, whose content is not known"
        )

    # Lengths in front, so that different media never give the same bytes in a row.
    sha.update(
        len(header).to_bytes(8, "little") + header.encode() + data.nbytes.to_bytes(8, "little")
    )
    sha.update(np.ascontiguousarray(data).data)
    return isinstance(value, torch.Tensor)


_AWAY = "the media's data does not reach the scheduler in this configuration"


class AnonymousMedia(Exception):
    """Error for a medium without pixels at hand, so that nothing proves its content."""


def spans_of(features: Any) -> tuple[MediumSpan, ...]:
    """Return place and digest of each medium.

    Raises
    ------
    AnonymousMedia
        A medium's data is not at hand.
    """
    spans: list[MediumSpan] = []
    for feature in features:
        if feature.data is None:
            raise AnonymousMedia(_AWAY)
        spans.append(
            MediumSpan(
                feature.mm_position.offset, feature.mm_position.length, media_digest(feature.data)
            )
        )

    return tuple(spans)


def prepare(request: Any, epoch: str, ttl: float | None = None) -> Prepared:
    """Convert a vLLM request for the cache, without text.

    Parameters
    ----------
    request : vllm.v1.request.Request
        The request.
    epoch : str
        Epoch of the server, or of the request's adapter.
    ttl : float or None
        Limit of the request for its state, in seconds.
    """
    token_ids = tuple(request.prompt_token_ids)
    # vLLM's prompt is token ids alone, and no level compares texts here.
    cache_request = Request(
        id=request.request_id,
        prompt="",
        chunk="",
        partition=partition_of(request.cache_salt),
        ttl=ttl,
    )

    return Prepared(cache_request, token_ids, spans_of(request.mm_features), epoch=epoch)


_Stamp = tuple[tuple[str, int, int, int, int], ...]


class UnprovenAdapter(Exception):
    """Error for an adapter whose weights are not proven. The request runs without reuse."""


class LoraAdapters:
    """LoRA adapters of one server.

    Parameters
    ----------
    base : str
        Epoch of the server without an adapter. It is set anew when the weights may have changed
        (`generations`).
    applied : Mapping[str, object] or None
        Settings of the server that change the result of an adapter, part of its epoch.
    forbidden : str
        Reason against reuse with any adapter, empty without one.
    leaks : bool
        vLLM's kernels apply an adapter to base-model rows of the same step
        (`upstream.adapters_leak`).
    """

    def __init__(
        self,
        base: str,
        applied: Mapping[str, object] | None = None,
        forbidden: str = "",
        leaks: bool = False,
    ) -> None:
        self.base = base
        self._applied = dict(applied or {})
        self._forbidden = forbidden
        self._leaks = leaks
        self._mixed = False
        self._started_ns = time.time_ns()
        self._bound: dict[int, tuple[str, bool]] = {}
        self._barred: dict[int | str, str] = {}
        self._fingerprints: dict[str, tuple[_Stamp, str]] = {}

    def note(self, lora: Any) -> None:
        """Note a request's adapter (None: no adapter) before the worker does. Touches no disk."""
        if lora is None:
            return

        binding = (str(lora.lora_path), bool(lora.is_3d_lora_weight))
        # The first use decides: vLLM reads an adapter when its id first comes.
        first_binding = self._bound.setdefault(lora.lora_int_id, binding)

        if lora.load_inplace:
            self._bar(
                lora.lora_int_id,
                first_binding,
                binding,
                "its adapter was loaded in place, over other weights of its id",
            )
        elif first_binding != binding:
            why = (
                f"lora_int_id {lora.lora_int_id} has stood for two adapters, and vLLM goes by it: "
                "give each its own"
            )
            self._bar(lora.lora_int_id, first_binding, binding, why)

    def step(self, loras: Iterable[Any]) -> None:
        """Note the adapters of a step's requests.

        With leaking kernels a step of both kinds spoils base-model state for good.
        """
        if self._leaks and not self._mixed:
            self._mixed = len({lora is None for lora in loras}) == 2

    def may_store(self, lora: Any) -> bool:
        """Tell whether state computed with this adapter is surely its own.

        Once base-model rows were computed wrongly, vLLM's own prefix cache may serve them to any
        later base request.
        """
        return not (self._mixed if lora is None else self.doubt(lora))

    def _bar(
        self, lora_id: int, first_binding: tuple[str, bool], binding: tuple[str, bool], why: str
    ) -> None:
        """Bar an id and both folders that it has stood for.

        vLLM's own blocks, which go by the folder, may hold what other weights computed, so another
        id does not help.
        """
        for key in (lora_id, first_binding[0], binding[0]):
            self._barred.setdefault(key, why)

    def epoch_of(self, lora: Any) -> str:
        """Return the epoch of a request with this adapter (None: the base model).

        Raises
        ------
        UnprovenAdapter
            The adapter's weights are not proven.
        """
        if lora is None:
            return self.base

        why = self.doubt(lora)
        if why:
            raise UnprovenAdapter(why)

        path = str(lora.lora_path)
        # Read once: `doubt` has made sure that the files are those of the start.
        if path not in self._fingerprints:
            folder = Path(path).expanduser()
            # Taken before the files are read, so that a change meanwhile is seen later.
            before = _stamp(folder)
            content = folder_fingerprint(folder)
            if content is None:
                raise UnprovenAdapter(f"its adapter's folder holds none of {', '.join(WEIGHTS)}")
            self._fingerprints[path] = (before, content)

        content = self._fingerprints[path][1]
        return epoch_of(
            {
                "base": self.base,
                "files": content,
                "3d": bool(lora.is_3d_lora_weight),
                **self._applied,
            }
        )

    def doubt(self, lora: Any) -> str:
        """Return why this adapter's state must not be used now; empty if it may be.

        The check takes a few `stat` calls.
        """
        if lora is None:
            return ""

        path = str(lora.lora_path)
        why = self._forbidden or self._barred.get(lora.lora_int_id) or self._barred.get(path)

        if why:
            return why

        try:
            stamp = _stamp(Path(path).expanduser())
        except OSError:
            return "its adapter is not a folder of this machine: download it and name the folder"

        changed = path in self._fingerprints and self._fingerprints[path][0] != stamp
        # The inode's change time: a copy that keeps modification times sets it nevertheless.
        if changed or max(item[-1] for item in stamp) > self._started_ns:
            return (
                "its adapter's files are newer than the server, which may hold older weights: "
                "restart the server"
            )
        return ""


def _stamp(folder: Path) -> _Stamp:
    """Return the file system's facts about an adapter's folder, to notice changed content.

    Returns
    -------
    tuple
        Name, inode, size, time of modification and time of the inode's change (ns): of the folder,
        of its JSON and weight files, and of symbolic links on the path and among these files.

    Raises
    ------
    OSError
        If the folder or one of the files cannot be read.
    """
    links = [path for path in (folder.absolute(), *folder.absolute().parents) if path.is_symlink()]
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.match("*.json") or any(map(path.match, WEIGHTS))
    ]

    path_stats = [(str(folder.resolve()), folder.stat())]
    path_stats += [(str(path), path.stat()) for path in files]
    # The links themselves, too: one may be pointed at another folder.
    path_stats += [
        (str(path), os.lstat(path))
        for path in links + [path for path in files if path.is_symlink()]
    ]

    return tuple(
        (name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in path_stats
    )
