"""Encoder outputs: the block that callers get, and its entry in a store on disk."""

import time
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from dejakv.encoder_cache.arrays import describe, from_raw, is_array, is_finite, size_of, to_raw
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.request import Modality
from dejakv.store.base import StateInfo, StoredState
from dejakv.store.store import Store

Resolution = tuple[int, int]

Key = tuple[str, str, str, str]
"""Partition, encoder epoch, modality, content hash."""

KIND = "encoder"
MODALITIES: frozenset[str] = frozenset(get_args(Modality))


def stored_id(key: Key) -> str:
    """Return the id of an output in a store: 40 hexadecimal digits of its whole key."""
    return digest_of(KIND, *key)[:40]


@dataclass(slots=True, eq=False)
class VisualEmbeddingBlock:
    """Output of an encoder (tower and projector) for one picture, sound or clip.

    Attributes
    ----------
    content_hash : str
        SHA-256 of the raw bytes, 64 hexadecimal digits.
    modality : str
        "image", "audio" or "video".
    resolution : tuple[int, int] or None
        (width, height) in pixels, None for media without one.
    embedding : array, shape [tokens, hidden] or [levels, tokens, hidden]
        Numpy or torch, on any device. It is the stored object, not a copy: do not write into it.
    encoder_model : str
        A label for people; the encoder epoch in the key keeps models apart.
    created_at : float
        `time.monotonic()` when this block was made, or loaded from disk.
    access_count : int
        Uses of this key in memory, counted on when a block is replaced. Updated by the cache.
    estimated_vram_bytes : int
        Bytes of the embedding's elements only: views are compacted when stored.
    encoder_seconds : float or None
        Time of the computation, None if not measured.
    born : float
        Time of the computation, in seconds since 1970. Set by the cache and stored on disk.
    ttl : float
        Lifetime from `born` in seconds; 0: no limit. Set by the cache and stored on disk.
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
    """Check the parts of a key that come from a caller.

    Raises
    ------
    InputError
        For an unknown modality, and for an empty hash, which different pictures would share.
    """
    if modality not in MODALITIES:
        raise InputError(
            f"unknown modality {modality!r}: use one of {', '.join(sorted(MODALITIES))}"
        )

    if not content_hash:
        raise InputError(
            "the content hash is empty: pass compute_content_hash(raw_bytes) of the medium's bytes"
        )


def save(store: Store, key: Key, block: VisualEmbeddingBlock) -> None:
    """Write a block in the background. It can be loaded at once.

    The call waits for nothing: a store that is full or slow drops the block.
    """
    partition, epoch, modality, content_hash = key
    metadata = {
        **describe(block.embedding),
        "modality": modality,
        "content_hash": content_hash,
        "resolution": list(block.resolution) if block.resolution else None,
        "encoder_model": block.encoder_model,
        "encoder_seconds": block.encoder_seconds,
    }

    meta = StateInfo(
        id=stored_id(key), partition=partition, epoch=epoch, token_ids=(), prompt="", chunk="",
        kind=KIND, created=block.born, ttl=block.ttl, metadata=metadata,
    )  # fmt: skip
    # The copy from a GPU is made by the store's worker and not by the request.
    store.submit(meta, lambda: to_raw(block.embedding))


def load(store: Store, key: Key) -> tuple[VisualEmbeddingBlock | None, bool]:
    """Load the block of exactly this key.

    Returns
    -------
    block : VisualEmbeddingBlock or None
        The block, its embedding on the CPU in memory of its own. None if the store has none, or if
        it cannot be read in less time than the encoder took.
    damaged : bool
        Whether the stored block was damaged.
    """
    id = stored_id(key)
    meta = store.meta(id)
    if meta is None:
        return None, False

    until, seconds, encoding = (
        None,
        store.remote_read_seconds(id),
        meta.metadata.get("encoder_seconds"),
    )
    # From a bucket, if that takes less time than the encoder took.
    if seconds and encoding is not None:
        if seconds >= encoding:
            return None, False
        until = time.monotonic() + encoding

    stored_state = store.get(id, until)
    if stored_state is None:
        # Late is not damaged: only a failure before the deadline counts.
        return None, until is None or time.monotonic() < until
    try:
        return _block_of(stored_state), False
    except InputError:
        # Or every lookup would read it and fail again.
        store.delete(id)
        return None, True


def _block_of(stored_state: StoredState) -> VisualEmbeddingBlock:
    """Rebuild a block from its stored form."""
    metadata = stored_state.meta.metadata
    embedding = from_raw(stored_state.tensor, metadata)
    return VisualEmbeddingBlock(
        content_hash=metadata["content_hash"],
        modality=metadata["modality"],
        resolution=cast(Resolution, tuple(metadata["resolution"]))
        if metadata["resolution"]
        else None,
        embedding=embedding,
        encoder_model=metadata["encoder_model"],
        created_at=time.monotonic(),
        estimated_vram_bytes=size_of(embedding),
        encoder_seconds=metadata["encoder_seconds"],
        born=stored_state.meta.created,
        ttl=stored_state.meta.ttl,
    )


def check_embedding(embedding: Any, *, finite: bool = True) -> None:
    """Check an embedding before it is kept.

    Raises
    ------
    InputError
        Unless it is a 2-D or 3-D array with elements and, if `finite`, without NaN or infinity.
    """
    shape = getattr(embedding, "shape", None)
    if shape is None or not is_array(embedding):
        raise InputError(
            "an embedding must be a numpy array or a torch tensor, not "
            f"{type(embedding).__name__}: "
            "stack the outputs of several levels into one tensor [levels, tokens, hidden]"
        )

    if len(shape) not in (2, 3):
        raise InputError(
            "an embedding must be [tokens, hidden] or [levels, tokens, hidden], not of shape "
            f"{tuple(shape)}: "
            "store one picture at a time"
        )

    if 0 in tuple(shape):
        raise InputError(
            f"the embedding of shape {tuple(shape)} has no elements: check the encoder's input"
        )

    if finite and not is_finite(embedding):
        raise InputError(
            "the embedding has NaN or infinite values and is not kept, because every request with "
            "this picture would get "
            "it: check the encoder's weights and dtype (float16 overflows), or build the cache "
            "with check_finite=False"
        )
