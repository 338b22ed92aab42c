"""An encoder output: the block that is handed out, and the named entry of a store that it is on disk."""

import time
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from dejakv.encoder_cache.arrays import describe, from_raw, is_array, is_finite, size_of, to_raw
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import Modality
from dejakv.store.base import ChunkMeta, StoredState
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
    metadata = {
        **describe(block.embedding),
        "modality": modality,
        "content_hash": content_hash,
        "resolution": list(block.resolution) if block.resolution else None,
        "encoder_model": block.encoder_model,
        "encoder_seconds": block.encoder_seconds,
    }

    meta = ChunkMeta(
        id=chunk_id(key), partition=partition, epoch=epoch, token_ids=(), prompt="", chunk="", kind=KIND,
        created=block.born, ttl=block.ttl, metadata=metadata,
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
        # Late is not damaged: only a failure before the deadline counts.
        return None, until is None or time.monotonic() < until
    try:
        return _block_of(chunk), False
    except InputError:
        # Or every lookup would read it and fail again.
        store.delete(id)
        return None, True


def _block_of(chunk: StoredState) -> VisualEmbeddingBlock:
    metadata = chunk.meta.metadata
    embedding = from_raw(chunk.tensor, metadata)
    return VisualEmbeddingBlock(
        content_hash=metadata["content_hash"],
        modality=metadata["modality"],
        resolution=cast(Resolution, tuple(metadata["resolution"])) if metadata["resolution"] else None,
        embedding=embedding,
        encoder_model=metadata["encoder_model"],
        created_at=time.monotonic(),
        estimated_vram_bytes=size_of(embedding),
        encoder_seconds=metadata["encoder_seconds"],
        born=chunk.meta.created,
        ttl=chunk.meta.ttl,
    )


def check_embedding(embedding: Any, *, finite: bool = True) -> None:
    """Raises InputError unless it is a 2-D or 3-D array with elements and, if `finite`, without NaN or infinity."""
    shape = getattr(embedding, "shape", None)
    if shape is None or not is_array(embedding):
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

    if finite and not is_finite(embedding):
        raise InputError(
            "the embedding has NaN or infinite values and is not kept, because every request with this picture would get "
            "it: check the encoder's weights and dtype (float16 overflows), or build the cache with check_finite=False"
        )
