"""The description of a chunk as one self-checking blob, for a row of SQLite.

Layout: 16 bytes of blake2b over all that follows, 4 bytes length of a JSON object, the object, then raw little-endian
arrays: token ids (uint32) and the vectors (float32) in the order of their names in the object.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dejakv.errors import StoreError
from dejakv.identity import Span
from dejakv.store.base import ChunkMeta, CorruptChunk

_DIGEST = 16
_TEXT_FIELDS = ("id", "partition", "epoch", "prompt", "chunk", "space", "kind", "embedder")
_COUNTS = ("nbytes", "position", "generation")


@dataclass(frozen=True)
class _Section:
    offset: int
    raw: bytes

    def take(self, count: int, dtype: str) -> tuple[Any, "_Section"]:
        if count < 0:
            raise ValueError("a negative count")
        array = np.frombuffer(self.raw, dtype=dtype, count=count, offset=self.offset)
        return array, _Section(self.offset + array.nbytes, self.raw)


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
    body = json.dumps(described, separators=(",", ":"), default=str).encode("utf-8", "surrogatepass")
    content = b"".join(
        [len(body).to_bytes(4, "little"), body, tokens.tobytes(), *(vector.tobytes() for vector in vectors.values())]
    )
    return hashlib.blake2b(content, digest_size=_DIGEST).digest() + content


def seconds_text(seconds: float) -> str:
    """A number of seconds in a text of always the same length, so that sizes tell nothing of times."""
    return f"{seconds:026.9f}"


def decode_meta(blob: bytes) -> ChunkMeta:
    """The meta in a blob of `encode_meta`. Raises: CorruptChunk."""
    content = blob[_DIGEST:]
    if len(content) < 4 or hashlib.blake2b(content, digest_size=_DIGEST).digest() != blob[:_DIGEST]:
        raise CorruptChunk("the description of a chunk is damaged")
    length = int.from_bytes(content[:4], "little")
    try:
        described: Any = json.loads(content[4 : 4 + length].decode("utf-8", "surrogatepass"))
        tokens, rest = _Section(4 + length, content).take(described["tokens"], "<u4")
        vectors: dict[str, Any] = {}
        for name, count in described["vectors"]:
            vectors[name], rest = rest.take(count, "<f4")
        meta = ChunkMeta(
            **{name: described[name] for name in _TEXT_FIELDS},
            token_ids=tuple(cast(list[int], tokens.tolist())),
            spans=tuple(Span(*span) for span in described["spans"]),
            vectors=vectors,
            answer=described["answer"],
            created=float(described["created"]),
            ttl=float(described["ttl"]),
            metadata=described["metadata"],
            **{name: described[name] for name in _COUNTS},
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptChunk("the description of a chunk has another version") from error
    wrong = _mistyped(meta)
    if wrong:
        raise CorruptChunk(f"the description of a chunk has a wrong {wrong}")
    return meta


def _mistyped(meta: ChunkMeta) -> str:
    """The first field that holds what no description holds: the checksum has no key, so that anybody can make one."""
    texts: dict[str, object] = {name: getattr(meta, name) for name in _TEXT_FIELDS}
    if meta.answer is not None:
        texts["answer"] = meta.answer
    for name, text in texts.items():
        if not isinstance(text, str) or not _is_unicode(text):
            return name
    for name in _COUNTS:
        number: object = getattr(meta, name)
        if type(number) is not int or not 0 <= number < 2**63:
            return name
    for name in ("created", "ttl"):
        seconds: Any = getattr(meta, name)
        if type(seconds) not in (int, float) or not math.isfinite(seconds):
            return name
    if not isinstance(cast(object, meta.metadata), dict):
        return "metadata"
    for span in meta.spans:
        place: tuple[object, ...] = (span.start, span.length, span.digest)
        if (
            tuple(map(type, place)) != (int, int, str)
            or not 0 <= span.start <= span.start + span.length <= meta.num_tokens
        ):
            return "span"
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
