"""Parts of a prompt's state: cut from a chunk by rows, and put together again. Axis 3 of a KV tensor counts rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dejakv.errors import InputError
from dejakv.identity import Span, exact_key
from dejakv.store.base import KV, NODE, Chunk, ChunkMeta, Rows, Tensor, as_node
from dejakv.store.codec import CorruptChunk

AXIS = 3
"""Axis of a KV tensor: `[2, layers, kv_heads, rows, head_dim]`."""
_DIMENSIONS = 5


def is_exact(chunk: Chunk) -> bool:
    """Whether it is the exact state of the prompt that its id names, row by row: only such state is shared."""
    meta = chunk.meta
    if meta.kind != KV or meta.position or meta.generation or not has_its_rows(chunk):
        return False
    try:
        return meta.num_tokens > 0 and meta.id == _key(meta, meta.token_ids, meta.spans)
    except InputError:
        return False


def has_its_rows(chunk: Chunk) -> bool:
    """Whether the tensor has a row for each token that the description says it has."""
    shape = chunk.tensor.shape
    return len(shape) == _DIMENSIONS and shape[AXIS] == chunk.meta.num_tokens - chunk.meta.rows_from


def delivered(chunk: Chunk) -> Chunk | None:
    """What one delivery (`TakesParts.put_part`) brings, described as what it is: a node, or with the last rows the prompt. None if
    it is no part of a prompt's exact state."""
    meta, shape = chunk.meta, chunk.tensor.shape
    if meta.kind != KV or meta.parent or meta.position or meta.generation or len(shape) != _DIMENSIONS:
        return None
    stop = meta.rows_from + shape[AXIS]
    if not 0 <= meta.rows_from < stop <= meta.num_tokens or outside_media(stop, meta.spans) != stop:
        return None
    try:
        if meta.id != _key(meta, meta.token_ids, meta.spans):
            return None
        return chunk if stop == meta.num_tokens else replace(chunk, meta=as_node(beginning_of(meta, stop)))
    except InputError:
        return None


def part_ends(tokens: int, most: int, align: int, spans: Sequence[Span] = ()) -> tuple[int, ...]:
    """Where the parts of a prompt end: each is at most so many tokens long and ends at a multiple of `align`, outside media. One is
    longer where a medium leaves no other place. The last part ends with the prompt."""
    ends, start = list[int](), 0
    step = max(align, most // align * align)
    while start + step < tokens:
        end = start + step
        while end > start and outside_media(end, spans) != end:
            end -= align
        if end == start:
            end = start + step
            while end < tokens and outside_media(end, spans) != end:
                end += align
        start = min(end, tokens)
        ends.append(start)
    return tuple(ends) if ends and ends[-1] == tokens else (*ends, tokens)


def outside_media(tokens: int, spans: Sequence[Span]) -> int:
    """So many tokens, or fewer, so that no medium is cut."""
    return min([tokens, *(span.start for span in spans if span.start < tokens < span.start + span.length)])


def beginning_of(meta: ChunkMeta, tokens: int) -> ChunkMeta:
    """The description of a prompt's first tokens. No medium may be cut."""
    ids = meta.token_ids[:tokens]
    spans = tuple(span for span in meta.spans if span.start < tokens)
    return replace(meta, id=_key(meta, ids, spans), token_ids=ids, spans=spans)


def row_bytes(meta: ChunkMeta) -> float:
    """Bytes of one row of a stored chunk."""
    return meta.nbytes / max(1, meta.num_tokens - meta.rows_from)


def cut(chunk: Chunk, meta: ChunkMeta, parent: ChunkMeta | None, stop: int) -> Chunk:
    """The rows of a chunk from the end of `parent` to `stop`, described by `meta`. A view."""
    first, start = chunk.meta.rows_from, parent.num_tokens if parent else 0
    data = chunk.tensor.data[:, :, :, start - first : stop - first]
    described = replace(meta, parent=parent.id if parent else "", rows_from=start)
    return Chunk(described, Tensor(data, chunk.tensor.dtype))


def follows(meta: ChunkMeta, parent: ChunkMeta | None) -> bool:
    """Whether the rows of `meta` begin where its parent's end."""
    return (
        parent is not None
        and parent.kind in (KV, NODE)
        and (parent.partition, parent.epoch, parent.num_tokens) == (meta.partition, meta.epoch, meta.rows_from)
        and parent.rows_from < parent.num_tokens
    )


def needed(chain: Iterable[ChunkMeta], rows: Rows | None) -> list[ChunkMeta]:
    """Which of a prompt's chunks have some of these rows."""
    return [meta for meta in chain if any(_inside(meta, [(0, meta.num_tokens)] if rows is None else rows))]


def check_alike(part: Chunk, state: Tensor) -> None:
    """Raises: CorruptChunk unless the part has its rows, and they are of the shape and type of `state`, of other rows."""
    shape, wanted = list(part.tensor.shape), list(state.shape)
    shape[AXIS : AXIS + 1] = wanted[AXIS : AXIS + 1] = [0]
    if (shape, part.tensor.dtype) != (wanted, state.dtype) or not has_its_rows(part):
        raise CorruptChunk(f"chunk {part.meta.id}: its rows have another shape than those before them")


class Assembly:
    """Rows `start` to `stop - 1` of a prompt's state in the making.

    A part is copied when it is added, while it is still in the processor's cache from having been verified.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._missing = stop - start
        self._made: Tensor | None = None

    def add(self, part: Chunk) -> None:
        """Copies what the part has of the rows; no two parts may have the same. Raises: CorruptChunk if the part does not fit those
        before it."""
        if self._made is None:
            shape = list(part.tensor.shape)
            shape[AXIS : AXIS + 1] = [self._stop - self._start]
            self._made = Tensor(np.empty(shape, part.tensor.data.dtype), part.tensor.dtype)
        check_alike(part, self._made)
        from_ = part.meta.rows_from
        for low, high in _inside(part.meta, [(self._start, self._stop)]):
            rows = part.tensor.data[:, :, :, low - from_ : high - from_]
            self._made.data[:, :, :, low - self._start : high - self._start] = rows
            self._missing -= high - low

    def tensor(self) -> Tensor | None:
        """The rows; None while some are missing."""
        if self._made is None or self._missing:
            return None
        self._made.data.flags.writeable = False
        return self._made


def joined(parts: Sequence[Chunk], start: int, stop: int) -> Tensor | None:
    """Rows `start` to `stop - 1` of a prompt's state, of which these parts hold some each; None if a row is missing. A view where
    there is one part. Raises: CorruptChunk for parts that do not fit each other."""
    if len(parts) == 1 and has_its_rows(parts[0]):
        first, data = parts[0].meta.rows_from, parts[0].tensor.data
        inside = first <= start < stop <= first + data.shape[AXIS]
        return Tensor(data[:, :, :, start - first : stop - first], parts[0].tensor.dtype) if inside else None
    made = Assembly(start, stop)
    for part in parts:
        made.add(part)
    return made.tensor()


def _inside(meta: ChunkMeta, rows: Rows) -> Iterator[tuple[int, int]]:
    """What of the rows a chunk holds."""
    for start, stop in rows:
        low, high = max(start, meta.rows_from), min(stop, meta.num_tokens)
        if low < high:
            yield low, high


def _key(meta: ChunkMeta, token_ids: Sequence[int], spans: Sequence[Span]) -> str:
    return exact_key(meta.partition, meta.epoch, token_ids, [span.digest for span in spans])
