"""An encoder output: the block that is handed out, the named entry of a store that it is on disk, and its embedding, a numpy array or
a torch tensor. Torch is imported only where a stored torch tensor is read."""

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import Modality
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.store import Store

Resolution = tuple[int, int]

Key = tuple[str, str, str, str]
"""Partition, encoder epoch, modality, content hash."""

KIND = "encoder"
MODALITIES: frozenset[str] = frozenset(get_args(Modality))


def chunk_id(key: Key) -> str:
    """The id of a key's output in a store, 40 hexadecimal digits: another partition, epoch or modality is another id."""
    return digest_of(KIND, *key)[:40]


@dataclass(slots=True, eq=False)
class VisualEmbeddingBlock:
    """The output of an encoder (tower and projector) for one picture, sound or clip.

    content_hash          SHA-256 of the raw bytes, 64 hexadecimal digits
    modality              "image", "audio" or "video"
    resolution            (width, height) in pixels, None for media without one
    embedding             `[tokens, hidden]`, or `[levels, tokens, hidden]`; numpy or torch, on any device; the stored
                          object, not a copy: do not write into it
    encoder_model         a label for people; the encoder epoch in the key keeps models apart
    created_at            `time.monotonic()` when it was stored
    access_count          how often it was served since then; updated by the cache while the block is in it
    estimated_vram_bytes  the bytes of the embedding's elements only: views are compacted when stored
    encoder_seconds       time of the computation, None if not measured
    born, ttl             seconds since 1970 when it was computed, and seconds for which it may be used from then on, 0 without
                          a limit; set by the cache, and kept on disk
    """

    content_hash: str
    modality: str
    resolution: Resolution | None
    embedding: Any = field(repr=False)
    encoder_model: str
    created_at: float
    access_count: int = 0
    estimated_vram_bytes: int = 0
    encoder_seconds: float | None = None
    born: float = 0.0
    ttl: float = 0.0


def check_key(modality: str, content_hash: str) -> None:
    """Raises: InputError for an unknown modality, and for an empty hash, which different pictures would share."""
    if modality not in MODALITIES:
        raise InputError(f"unknown modality {modality!r}: use one of {', '.join(sorted(MODALITIES))}")
    if not content_hash:
        raise InputError("the content hash is empty: pass compute_content_hash(raw_bytes) of the medium's bytes")


def save(store: Store, key: Key, block: VisualEmbeddingBlock) -> None:
    """Writes a block in the background; it can be loaded at once. Waits for nothing; a store that is full or slow drops it."""
    partition, epoch, modality, content_hash = key
    about = {
        **describe(block.embedding),
        "modality": modality,
        "content_hash": content_hash,
        "resolution": list(block.resolution) if block.resolution else None,
        "encoder_model": block.encoder_model,
        "encoder_seconds": block.encoder_seconds,
    }
    meta = ChunkMeta(
        id=chunk_id(key), partition=partition, epoch=epoch, token_ids=(), prompt="", chunk="", kind=KIND,
        created=block.born, ttl=block.ttl, metadata=about,
    )  # fmt: skip
    store.submit(meta, lambda: to_raw(block.embedding))


def load(store: Store, key: Key) -> tuple[VisualEmbeddingBlock | None, bool]:
    """The block of exactly this key, its embedding on the CPU and the caller's own, or None; and whether it was damaged."""
    id = chunk_id(key)
    meta = store.meta(id)
    if meta is None:
        return None, False
    until, seconds, encoding = None, store.away(id), meta.metadata.get("encoder_seconds")
    if seconds and encoding is not None:  # from a bucket, if that takes less time than the encoder took
        if seconds >= encoding:
            return None, False
        until = time.monotonic() + encoding
    chunk = store.get(id, until)
    if chunk is None:
        return None, until is None or time.monotonic() < until
    try:
        return _block_of(chunk), False
    except InputError:
        store.delete(id)
        return None, True


def _block_of(chunk: Chunk) -> VisualEmbeddingBlock:
    about = chunk.meta.metadata
    embedding = from_raw(chunk.tensor, about)
    return VisualEmbeddingBlock(
        content_hash=about["content_hash"],
        modality=about["modality"],
        resolution=cast(Resolution, tuple(about["resolution"])) if about["resolution"] else None,
        embedding=embedding,
        encoder_model=about["encoder_model"],
        created_at=time.monotonic(),
        estimated_vram_bytes=size_of(embedding),
        encoder_seconds=about["encoder_seconds"],
        born=chunk.meta.created,
        ttl=chunk.meta.ttl,
    )


def is_torch(embedding: Any) -> bool:
    """Whether it is a torch tensor (anything with an untyped storage counts)."""
    return hasattr(embedding, "untyped_storage")


def size_of(embedding: Any) -> int:
    """The bytes of the elements: their number times the element size."""
    nbytes = getattr(embedding, "nbytes", None)
    if nbytes is None:
        nbytes = embedding.element_size() * embedding.nelement()
    return int(nbytes)


def owned(embedding: Any) -> Any:
    """The embedding alone, without an autograd graph or the storage of a larger batch that it would keep alive.

    A slice of a batch's output keeps the whole batch in memory, which no byte budget would count. Compact, plain
    embeddings come back as they are; others are copied once.
    """
    if is_torch(embedding):
        if embedding.requires_grad:
            embedding = embedding.detach()
        return embedding.clone() if embedding.untyped_storage().nbytes() > embedding.nbytes else embedding
    array = cast("NDArray[Any]", embedding)
    base = array.base
    return array.copy() if base is not None and int(getattr(base, "nbytes", 0)) > array.nbytes else array


def check_embedding(embedding: Any, *, finite: bool = True) -> None:
    """Raises InputError unless it is a 2-D or 3-D array with elements and, if `finite`, without NaN or infinity."""
    shape = getattr(embedding, "shape", None)
    if shape is None or not (is_torch(embedding) or isinstance(embedding, np.ndarray)):
        raise InputError(
            f"an embedding must be a numpy array or a torch tensor, not {type(embedding).__name__}: "
            "stack the outputs of several levels into one tensor [levels, tokens, hidden]"
        )
    if len(shape) not in (2, 3):
        raise InputError(
            f"an embedding must be [tokens, hidden] or [levels, tokens, hidden], not of shape {tuple(shape)}: "
            "store one picture at a time"
        )
    if 0 in tuple(shape):
        raise InputError(f"the embedding of shape {tuple(shape)} has no elements: check the encoder's input")
    if finite and not _is_finite(embedding):
        raise InputError(
            "the embedding has NaN or infinite values and is not kept, because every request with this picture would get "
            "it: check the encoder's weights and dtype (float16 overflows), or build the cache with check_finite=False"
        )


def _is_finite(embedding: Any) -> bool:
    if is_torch(embedding):
        return not embedding.is_floating_point() or bool(embedding.isfinite().all())
    array = cast("NDArray[Any]", embedding)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def describe(embedding: Any) -> dict[str, Any]:
    """Description of the embedding's kind, for `from_raw`."""
    shape = [int(size) for size in embedding.shape]
    if is_torch(embedding):
        return {"framework": "torch", "dtype": str(embedding.dtype).removeprefix("torch."), "shape": shape}
    return {"framework": "numpy", "dtype": embedding.dtype.str, "shape": shape}


def to_raw(embedding: Any) -> Tensor:
    """The bytes of the embedding: a copy unless it is on the CPU."""
    if is_torch(embedding):
        torch = importlib.import_module("torch")
        raw = embedding.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        raw = np.ascontiguousarray(embedding).reshape(-1).view(np.uint8)
    return Tensor(raw, "U8")


def from_raw(tensor: Tensor, described: Mapping[str, Any]) -> Any:
    """The embedding on the CPU, in its own memory. Imports torch if the embedding was a torch tensor.

    Raises InputError if the description does not fit the tensor.
    """
    flat = np.array(tensor.data).reshape(-1).view(np.uint8)
    try:
        if described["framework"] == "numpy":
            embedding: Any = flat.view(described["dtype"])
        else:
            torch = importlib.import_module("torch")
            embedding = torch.from_numpy(flat).view(getattr(torch, described["dtype"]))
        return embedding.reshape(described["shape"])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"stored encoder output does not fit its description ({error}): delete it") from error
