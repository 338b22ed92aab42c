"""Values of the store: computed state of a prompt or of a part of it, and its description."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError, former_names
from dejakv.identity import MediumSpan

KV = "kv"
"""Kind of an entry with the exact state of a prompt."""

ROWS = "rows"
"""Kind of an entry with rows of a blended prompt that were computed in every layer.

Only later blends use these rows.
"""

SNAPSHOT = "snapshot"
"""Kind of an entry with the fixed state of a model after the first tokens of a prompt."""
SAVED_TOKENS = "saved_tokens"
"""Key in the metadata of a snapshot: tokens between it and the one before it in its prompt."""

OFFLOAD_CHUNK = "offload_chunk"
"""Kind of an entry with pages of vLLM's offloading, which has given them a name of its own."""

Rows = Sequence[tuple[int, int]]
"""Ranges of rows `[start, stop)`, counted in the whole prompt."""

AXIS = 3
"""Axis of a state that counts rows.

The shape is `[2, layers, kv_heads, rows, head_dim]`, or `[1, 1, 1, pages, bytes]` for a state of
pages.
"""

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1", "I64": "<i8"}
"""NumPy dtype of the array by safetensors name. BF16 is held as bit patterns in uint16."""


class CorruptState(StoreError):
    """Stored bytes differ from the written ones.

    The store catches this error and counts a miss.
    """


@dataclass(frozen=True)
class RawTensor:
    """Raw tensor data without a framework.

    Attributes
    ----------
    data : ndarray
        C-contiguous array with the element size of `dtype` (bfloat16 as uint16 bit patterns). It
        may be a memory map.
    dtype : str
        Safetensors name: "F32", "BF16", "F16", "U8" or "I64".
    page : int
        Rows of a state behind one index of `AXIS`: more than 1 where the state consists of an
        engine's pages.
    """

    data: NDArray[Any]
    dtype: str
    page: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; a state of pages counts pages along `AXIS`."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(self.data.nbytes)

    def rows(self, start: int, stop: int) -> "RawTensor":
        """Return a view of rows `start` to `stop - 1` of a state, in whole pages.

        Parameters
        ----------
        start : int
            First row, counted in this tensor. It must begin a page.
        stop : int
            Row after the last one.

        Returns
        -------
        RawTensor
            A view without a copy. Its last page may hold rows after `stop`.
        """
        # The start must lie on a page: callers cut at multiples of `writing._cut_unit`.
        # The end is rounded up: the last page may hold fewer rows than it has room for.
        return replace(self, data=self.data[:, :, :, start // self.page : -(-stop // self.page)])


@dataclass(frozen=True)
class StateInfo:
    """Description of an entry without its tensor, to rebuild levels and guards after a restart.

    Attributes
    ----------
    id : str
        `identity.exact_key` of the prompt for `KV`, `identity.rows_key` for `ROWS`; other kinds
        have keys of their own.
    partition : str
        Whose prompt it is: nothing is found across partitions.
    epoch : str
        Fingerprint of all that makes the same tokens give other state.
    token_ids : tuple[int, ...]
        Tokens of the prompt, media placeholders included.
    prompt : str
        Text of the prompt.
    chunk : str
        Text that levels compare.
    space : str
        Space of the levels' index (`Query.space`).
    spans : tuple[MediumSpan, ...]
        Media of the prompt, with their places in `token_ids`.
    kind : str
        `KV` for exact state of a prompt. Entries of other kinds (`ROWS`, `SNAPSHOT`,
        `OFFLOAD_CHUNK`, `encoder`, `fusion`, `task`) are never used as exact state of a prompt.
    embedder : str
        Fingerprint of the embedder of `vectors`; vectors of another embedder are ignored.
    vectors : Mapping[str, ndarray]
        Latent and text vectors by layer, float32 with one dimension, to spare embedding after a
        restart.
    answer : str | None
        The model's answer, if it is stored (for reports, guards, and the setting `answers`).
    created : float
        Time of computation, in seconds since 1970.
    nbytes : int
        Bytes of the tensor; set by the store.
    metadata : Mapping[str, Any]
        Further facts in JSON, such as the donors of a blend's rows.
    position : int
        Position of the first token in its prompt; 0 for exact state of a prompt.
    generation : int
        Depth of approximate state; 0 for exact state.
    ttl : float
        Seconds after `created` for which the entry may be used; 0: no limit.
    """

    id: str
    partition: str
    epoch: str
    token_ids: tuple[int, ...]
    prompt: str
    chunk: str
    space: str = ""
    spans: tuple[MediumSpan, ...] = ()
    kind: str = KV
    embedder: str = ""
    vectors: Mapping[str, NDArray[np.float32]] = field(
        default_factory=dict[str, NDArray[np.float32]]
    )
    answer: str | None = None
    created: float = 0.0
    nbytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    position: int = 0
    generation: int = 0
    ttl: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens, media placeholders included."""
        return len(self.token_ids)


@dataclass(frozen=True)
class StoredState:
    """State of a prompt, or of a part of it, with its description.

    Attributes
    ----------
    meta : StateInfo
        Description of the whole entry.
    tensor : RawTensor, shape [2, layers, kv_heads, tokens, head_dim]
        For `KV`: keys, then values. Keys are as the model cached them, rotated for positions from
        `meta.position`. An engine with pages of its own stores those: `[1, 1, 1, pages, bytes]`.
    rows : Rows | None
        Range of the prompt in the tensor, as `[(first, stop)]`; None: all of it.
    """

    meta: StateInfo
    tensor: RawTensor
    rows: Rows | None = None

    @property
    def first(self) -> int:
        """First row of the prompt in the tensor."""
        return self.rows[0][0] if self.rows else 0

    @property
    def stop(self) -> int:
        """Row after the last one in the tensor."""
        return self.rows[-1][1] if self.rows else self.meta.num_tokens

    def read(self, rows: Rows) -> "Sequence[StoredState]":
        """Return this state as its only part: it is in memory (see `engines.base.Donor`).

        Parameters
        ----------
        rows : Rows
            Ignored, since all rows are in memory.

        Returns
        -------
        Sequence[StoredState]
            This state alone.
        """
        return (self,)

    def whole(self) -> "StoredState":
        """Return this state (see `engines.base.Donor`).

        Returns
        -------
        StoredState
            This state, without a copy.
        """
        return self


@dataclass(frozen=True)
class PrefixHit:
    """A stored prefix.

    Attributes
    ----------
    donor : str
        Id of the prompt for which it was stored, or of the prefix alone.
    tokens : int
        Length in tokens, media included.
    """

    donor: str
    tokens: int


@dataclass(frozen=True)
class WriterStats:
    """Outcomes of submissions.

    Attributes
    ----------
    submitted : int
        All submissions.
    stored : int
        States that were stored.
    empty : int
        Submissions without a state, or cancelled by `complete`.
    refused : int
        States that the store refused.
    dropped : int
        Submissions that met a full queue or a closed store, or that were removed before they were
        stored.
    errors : int
        Submissions for which a callback or the store raised. One whose `after` raised counts as
        stored, too.
    """

    submitted: int = 0
    stored: int = 0
    empty: int = 0
    refused: int = 0
    dropped: int = 0
    errors: int = 0


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and its present content.

    Attributes
    ----------
    entries, bytes : int
        Present content: prompts, rows of blends and named tensors; bytes of segments and
        descriptions.
    hits, misses : int
        Reads that returned state, and reads that returned none.
    puts : int
        Stored states.
    refused : Mapping[str, int]
        States that were not stored, by reason.
    evictions : Mapping[str, int]
        Evicted entries, by the limit that was exceeded.
    corrupt : int
        Damaged or missing objects and descriptions, and headers in a feed that do not fit their
        objects.
    late : int
        Misses because the deadline of a read had passed.
    bucket_away_seconds, feed_away_seconds : float
        Seconds since the service failed three times in a row; 0 if it has answered since, or if
        there is none.
    submissions : WriterStats
        Outcomes of `Store.submit`, of all partitions.
    """

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    corrupt: int = 0
    late: int = 0
    bucket_away_seconds: float = 0.0
    feed_away_seconds: float = 0.0
    submissions: WriterStats = WriterStats()


_DIGEST = 16
_TEXT_FIELDS = ("id", "partition", "epoch", "prompt", "chunk", "space", "kind", "embedder")
_COUNTS = ("nbytes", "position", "generation")


def encode_meta(meta: StateInfo) -> bytes:
    """Encode a description as one self-checking blob, for a row of SQLite.

    Layout: 16 bytes of blake2b over all that follows, 4 bytes length of a JSON object, the object,
    then raw little-endian arrays: token ids (uint32) and the vectors (float32) in the order of
    their names in the object.

    Values of `metadata` should be JSON; other values become their `str`.

    Raises
    ------
    StoreError
        If a token id is no number from 0 to 2**32 - 1, or a vector has more than one dimension.
    """
    try:
        tokens = np.array(meta.token_ids, dtype="<u4")
    except (OverflowError, ValueError, TypeError) as error:
        raise StoreError("token ids must be whole numbers from 0 to 2**32 - 1") from error

    vectors = {
        name: np.ascontiguousarray(vector, dtype="<f4") for name, vector in meta.vectors.items()
    }
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
    body = json.dumps(described, separators=(",", ":"), default=str).encode(
        "utf-8", "surrogatepass"
    )

    content = b"".join(
        [
            len(body).to_bytes(4, "little"),
            body,
            tokens.tobytes(),
            *(vector.tobytes() for vector in vectors.values()),
        ]
    )
    return hashlib.blake2b(content, digest_size=_DIGEST).digest() + content


def seconds_text(seconds: float) -> str:
    """Return seconds as a text of constant length, so that sizes tell nothing of times."""
    return f"{seconds:026.9f}"


@lru_cache(128)
def decode_meta(blob: bytes) -> StateInfo:
    """Decode a blob of `encode_meta`; the 128 latest descriptions are remembered.

    Raises
    ------
    CorruptState
        For a damaged blob, or one of another version.
    """
    content = blob[_DIGEST:]
    if len(content) < 4 or hashlib.blake2b(content, digest_size=_DIGEST).digest() != blob[:_DIGEST]:
        raise CorruptState("the description of a chunk is damaged")

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

        return StateInfo(
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
        raise CorruptState("the description of a chunk has another version") from error


OUTAGES = ("bucket_away_seconds", "feed_away_seconds")
"""Figures of `StoreStats` that say for how long a service has failed."""


def check_tensor(tensor: RawTensor) -> None:
    """Check that a tensor can be stored.

    Raises
    ------
    StoreError
        If its dtype is outside of `NUMPY_DTYPES` or does not fit the array, or it has more than 16
        dimensions.
    """
    # numpy has no bfloat16, so its bit patterns come as uint16: name and array must agree.
    expected = NUMPY_DTYPES.get(tensor.dtype)
    if expected is None or tensor.data.dtype.newbyteorder("<") != np.dtype(expected):
        raise StoreError(
            f"a tensor of dtype {tensor.dtype!r} in an array of {tensor.data.dtype} cannot be "
            "stored: "
            "give one of "
            f"{', '.join(f'{name} as {kind[1:]}' for name, kind in NUMPY_DTYPES.items())}"
        )

    if tensor.data.ndim > 16:
        raise StoreError(f"a tensor of {tensor.data.ndim} dimensions cannot be stored: 16 at most")


def consecutive_views(parts: Sequence[StoredState], start: int, stop: int) -> list[RawTensor]:
    """Return views of rows `start` to `stop - 1` of a prompt's state, in order.

    Parameters
    ----------
    parts : Sequence[StoredState]
        Parts with some rows each; they may overlap.
    start, stop : int
        Rows of the prompt.

    Returns
    -------
    list[RawTensor]
        One view if a single part has all rows. Empty if a row is missing.

    Raises
    ------
    CorruptState
        If the parts do not fit each other.
    """
    # One part with all rows spares the copy that joining several would cost.
    for part in parts:
        if part.first <= start < stop <= part.stop:
            parts = (part,)
            break

    views: list[RawTensor] = []
    next_row = start
    for part in sorted(parts, key=lambda one: one.first):
        low, high = max(next_row, part.first), min(stop, part.stop)
        if low >= high:
            continue
        # A gap: state with missing rows is of no use.
        if low != next_row:
            return []
        if views:
            check_alike(part, views[0])
        views.append(part.tensor.rows(low - part.first, high - part.first))
        next_row = high

    return views if next_row == stop else []


def joined(parts: Sequence[StoredState], start: int, stop: int) -> RawTensor | None:
    """Join rows `start` to `stop - 1` of a prompt's state into one tensor.

    Parameters
    ----------
    parts : Sequence[StoredState]
        As for `consecutive_views`.
    start, stop : int
        Rows of the prompt. In a state of pages, `start` begins a page.

    Returns
    -------
    RawTensor | None
        A view if a single part has all rows, else a read-only copy. None if a row is missing.

    Raises
    ------
    CorruptState
        If the parts do not fit each other.
    """
    views = consecutive_views(parts, start, stop)
    if len(views) < 2:
        return views[0] if views else None

    data = np.concatenate([view.data for view in views], AXIS)

    # As a view of a stored object is: nobody may change what others share.
    data.flags.writeable = False
    return replace(views[0], data=data)


def check_alike(part: StoredState, state: RawTensor) -> None:
    """Check that a part fits the rest of a state.

    Raises
    ------
    CorruptState
        If the part differs from `state` in shape (rows apart), dtype or page.
    """
    shape, expected_shape = list(part.tensor.shape), list(state.shape)
    shape[AXIS : AXIS + 1] = expected_shape[AXIS : AXIS + 1] = [0]
    if (shape, part.tensor.dtype, part.tensor.page) != (expected_shape, state.dtype, state.page):
        raise CorruptState(
            f"state {part.meta.id}: its rows have another shape than those before them"
        )


__getattr__ = former_names(
    __name__,
    Chunk="StoredState",
    ChunkMeta="StateInfo",
    CorruptChunk="CorruptState",
    Tensor="RawTensor",
)
