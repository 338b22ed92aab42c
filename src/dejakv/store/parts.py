"""Parts of a prompt's state: cut from a chunk by rows, and put together again. Axis 3 of a KV tensor counts rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dejakv.errors import InputError
from dejakv.identity import Span, exact_key
from dejakv.store.base import KV, NODE, Chunk, ChunkMeta, Rows, Tensor
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


def assembled(meta: ChunkMeta, parts: Sequence[Chunk], rows: Rows | None) -> Chunk:
    """A prompt's state from its parts, `rows` of it or all. Rows of which no part is given are undefined.

    Raises: CorruptChunk if the parts do not fit each other.
    """
    first = parts[0].tensor
    shape = list(first.shape)
    shape[AXIS : AXIS + 1] = [meta.num_tokens]
    whole = np.empty(shape, first.data.dtype)
    for part in parts:
        start, expected = part.meta.rows_from, list(shape)
        expected[AXIS : AXIS + 1] = [part.meta.num_tokens - start]
        if list(part.tensor.shape) != expected or part.tensor.dtype != first.dtype or not has_its_rows(part):
            raise CorruptChunk(f"chunk {part.meta.id}: its rows have another shape than those before them")
        for low, high in _inside(part.meta, [(0, meta.num_tokens)] if rows is None else rows):
            whole[:, :, :, low:high] = part.tensor.data[:, :, :, low - start : high - start]
    whole.flags.writeable = False
    described = replace(meta, parent="", rows_from=0, nbytes=whole.nbytes)
    return Chunk(described, Tensor(whole, first.dtype), rows)


def _inside(meta: ChunkMeta, rows: Rows) -> Iterator[tuple[int, int]]:
    """What of the rows a chunk holds."""
    for start, stop in rows:
        low, high = max(start, meta.rows_from), min(stop, meta.num_tokens)
        if low < high:
            yield low, high


def _key(meta: ChunkMeta, token_ids: Sequence[int], spans: Sequence[Span]) -> str:
    return exact_key(meta.partition, meta.epoch, token_ids, [span.digest for span in spans])
