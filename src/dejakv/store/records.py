"""The description of a chunk as one self-checking blob, for a row of SQLite.

Layout: 16 bytes of blake2b over all that follows, 4 bytes length of a JSON object, the object, then raw little-endian
arrays: token ids (uint32) and the vectors (float32) in the order of their names in the object.
"""

import hashlib
import json
from functools import lru_cache
from typing import Any, cast

import numpy as np

from dejakv.errors import StoreError
from dejakv.identity import MediumSpan
from dejakv.store.base import ChunkMeta, CorruptChunk

_DIGEST = 16
_TEXT_FIELDS = ("id", "partition", "epoch", "prompt", "chunk", "space", "kind", "embedder")
_COUNTS = ("nbytes", "position", "generation")


def encode_meta(meta: ChunkMeta) -> bytes:
    """The blob. `metadata` should be JSON; other values become their `str`.

    Raises: StoreError if a token id is negative or above 2**32 - 1, or a vector has more than one dimension.
    """
    try:
        tokens = np.array(meta.token_ids, dtype="<u4")
    except (OverflowError, ValueError, TypeError) as error:
        raise StoreError("token ids must be whole numbers from 0 to 2**32 - 1") from error

    vectors = {name: np.ascontiguousarray(vector, dtype="<f4") for name, vector in meta.vectors.items()}
    if any(vector.ndim != 1 for vector in vectors.values()):
        raise StoreError("a chunk's vectors must have one dimension each: reshape(-1) them")
    described = {name: getattr(meta, name) for name in (*_TEXT_FIELDS, *_COUNTS)} | {
        "spans": [[span.start, span.length, span.digest] for span in meta.spans],
        "answer": meta.answer,
        "created": seconds_text(meta.created),
        "ttl": seconds_text(meta.ttl),
        "metadata": dict(meta.metadata),
        "tokens": int(tokens.size),
        "vectors": [[name, int(vector.size)] for name, vector in vectors.items()],
    }
    # Prompts may hold lone surrogates, which plain UTF-8 refuses.
    body = json.dumps(described, separators=(",", ":"), default=str).encode("utf-8", "surrogatepass")

    content = b"".join(
        [len(body).to_bytes(4, "little"), body, tokens.tobytes(), *(vector.tobytes() for vector in vectors.values())]
    )
    return hashlib.blake2b(content, digest_size=_DIGEST).digest() + content


def seconds_text(seconds: float) -> str:
    """Seconds as a text of constant length, so that sizes tell nothing of times."""
    return f"{seconds:026.9f}"


@lru_cache(128)
def decode_meta(blob: bytes) -> ChunkMeta:
    """Decode a blob of `encode_meta`. Raises: CorruptChunk for a damaged one, or another version's."""
    content = blob[_DIGEST:]
    if len(content) < 4 or hashlib.blake2b(content, digest_size=_DIGEST).digest() != blob[:_DIGEST]:
        raise CorruptChunk("the description of a chunk is damaged")

    length = int.from_bytes(content[:4], "little")
    try:
        described: Any = json.loads(content[4 : 4 + length].decode("utf-8", "surrogatepass"))
        offset = 4 + length
        # `frombuffer` raises for a count or offset outside of the blob, and allocates nothing.
        tokens = np.frombuffer(content, "<u4", described["tokens"], offset)
        offset += tokens.nbytes
        vectors: dict[str, Any] = {}
        for name, count in described["vectors"]:
            vectors[name] = np.frombuffer(content, "<f4", count, offset)
            offset += 4 * count

        return ChunkMeta(
            **{name: described[name] for name in _TEXT_FIELDS},
            token_ids=tuple(cast(list[int], tokens.tolist())),
            spans=tuple(MediumSpan(*span) for span in described["spans"]),
            vectors=vectors,
            answer=described["answer"],
            created=float(described["created"]),
            ttl=float(described["ttl"]),
            metadata=described["metadata"],
            **{name: described[name] for name in _COUNTS},
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptChunk("the description of a chunk has another version") from error
