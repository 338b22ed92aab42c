"""Values of the encoder cache: one encoder output, and the answer to one request for it."""

from dataclasses import dataclass, field
from typing import Any, Final, get_args

from dejakv.errors import InputError
from dejakv.request import Modality

Resolution = tuple[int, int]

MODALITIES: Final[frozenset[str]] = frozenset(get_args(Modality))


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


@dataclass(frozen=True, eq=False)
class VisualCacheResult:
    """The answer to one request for an encoder output.

    reuse_count       how often this output has been served without the encoder, including this time
    vram_saved_bytes  bytes of the embedding if it was served without the encoder, else 0
    """

    cache_hit: bool
    content_hash: str
    embedding: Any = field(repr=False)
    reuse_count: int
    vram_saved_bytes: int
    dp_mode_recommended: bool


def check_modality(modality: str) -> None:
    """Raises InputError unless the modality is one the cache knows."""
    if modality not in MODALITIES:
        raise InputError(f"unknown modality {modality!r}: use one of {', '.join(sorted(MODALITIES))}")


def check_content_hash(content_hash: str) -> None:
    """Raises InputError for an empty content hash, which would be the same for different pictures."""
    if not content_hash:
        raise InputError("the content hash is empty: pass compute_content_hash(raw_bytes) of the medium's bytes")
