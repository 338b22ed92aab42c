"""Writes a chunk: objects, then their rows in one transaction."""

import math
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dejakv.errors import InputError, StoreError
from dejakv.identity import BLOCK_TOKENS, exact_key
from dejakv.store import changes
from dejakv.store.base import AXIS, INT8, KV, ChunkMeta, StoredState, Tensor, check
from dejakv.store.budgets import POLICIES, Budget, NoRoom
from dejakv.store.catalog import Catalog, SegmentSlice
from dejakv.store.changes import Removal, Uses
from dejakv.store.counters import logger
from dejakv.store.keys import PrefixKeys
from dejakv.store.objects import Objects, StoreUnavailable
from dejakv.store.reconcile import is_there
from dejakv.store.records import encode_meta
from dejakv.store.segment import NEVER, RECORD, Segment, cut, encode, quantized
from dejakv.store.selection import DONORS, PROMPT


class WriteRefused(StoreError):
    """A chunk is not taken; its text is the reason."""


class TryAgain(Exception):
    """A transaction's basis has left the store."""


Written = tuple[Removal, list[tuple[str, str]]]
"""What left for a put, and (partition, limit) of each record evicted."""


@dataclass(frozen=True)
class _RecordWrite:
    """A record to write (None: of a prompt whose last part has not come), its present pieces and the new ones."""

    meta: ChunkMeta
    about: bytes | None
    chain: list[SegmentSlice]
    segments: list[Segment]
    tensors: list[Tensor]


def write(
    objects: Objects,
    catalog: Catalog,
    budget: Budget,
    stored_state: StoredState,
    now: float,
    uses: Uses,
    purges: int = 0,
) -> Written:
    """Store a chunk, of a prompt's exact state only the part behind stored prefixes, and note `uses`. Nothing has changed if it raises.
    `purges`: see `Segment`. Raises: Refused, NoRoom, sqlite3.Error, Unknown, and StoreError or InputError for an invalid chunk."""
    check(stored_state.tensor)
    meta = replace(stored_state.meta, nbytes=stored_state.tensor.nbytes, created=stored_state.meta.created or now)
    if stored_state.rows is not None and not _is_exact(stored_state):
        raise WriteRefused("invalid")
    # Again if stored prefixes it counted on have left before the transaction.
    while True:
        record_write = (
            _prompt(catalog, meta, stored_state, now, objects.shared)
            if _is_exact(stored_state)
            else _alone(meta, stored_state)
        )
        needed_bytes = len(record_write.about or b"") + sum(tensor.nbytes for tensor in record_write.tensors)
        if any(0 < max_bytes < needed_bytes for _, max_bytes, _ in budget.limits(meta.partition)):
            raise WriteRefused("too_large")

        segments: list[Segment] = []
        try:
            for segment, tensor in zip(record_write.segments, record_write.tensors, strict=True):
                encoded, parts = encode(replace(segment, name=secrets.token_hex(16), purges=purges), tensor)
                # Before `put`, whose failure may still leave an object to undo.
                segments.append(encoded)
                # Before the rows: there is never a row without its object.
                objects.put(encoded.name, parts)
            with catalog.transaction() as sql:
                changes.touch(sql, uses)
                return _rows(sql, objects, budget, record_write, segments)
        except BaseException as error:
            undo(objects, catalog, segments)
            if isinstance(error, NoRoom):
                raise WriteRefused("too_large") from error
            if not isinstance(error, TryAgain):
                raise


def _is_exact(stored_state: StoredState) -> bool:
    """Whether it is exact state of the prompt named by its id, row by row: only such state is shared."""
    meta, shape = stored_state.meta, stored_state.tensor.shape
    if meta.kind != KV or meta.position or meta.generation or len(shape) != 5 or not meta.token_ids:
        return False
    if not 0 <= stored_state.first < stored_state.stop <= meta.num_tokens or stored_state.first % _unit(stored_state):
        return False
    if shape[AXIS] != -((stored_state.first - stored_state.stop) // stored_state.tensor.page):
        return False
    try:
        # The caller's word is not enough: a wrong id would serve other prompts wrong state.
        return meta.id == exact_key(meta.partition, meta.epoch, meta.token_ids, [span.digest for span in meta.spans])
    except InputError:
        return False


def _unit(stored_state: StoredState) -> int:
    """Number of rows at whose multiples its state may be cut: pages, in blocks with names."""
    return math.lcm(stored_state.tensor.page, BLOCK_TOKENS) if stored_state.tensor.page > 1 else 1


def _alone(meta: ChunkMeta, stored_state: StoredState) -> _RecordWrite:
    """Rows of a blend, state in 8 bits, or a named tensor: one segment without keys."""
    tensor = quantized(stored_state.tensor) if meta.kind == INT8 else stored_state.tensor
    meta = replace(meta, nbytes=tensor.nbytes)
    about = encode_meta(meta)
    count = tensor.shape[AXIS] if len(tensor.shape) > AXIS else 0
    segment = Segment(
        "", meta.partition, meta.epoch, meta.kind, 0, count, record=meta.id, position=meta.position,
        generation=meta.generation, lineage=(*meta.metadata.get(DONORS, ()), meta.metadata.get(PROMPT, "")),
        created=meta.created, ttl=meta.ttl, about=about,
    )  # fmt: skip
    return _RecordWrite(meta, about, [], [segment], [tensor])


def _prompt(catalog: Catalog, meta: ChunkMeta, stored_state: StoredState, now: float, shared: bool) -> _RecordWrite:
    keys = PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans)
    chain, cuts, begin, unit = list[SegmentSlice](), set[int](), 0, _unit(stored_state)
    for segment_slice in catalog.longest(keys, stored_state.stop, now, partial_block=False):
        if segment_slice.stop < segment_slice.end and segment_slice.due < _due(meta):
            # It leaves before this prompt does: its rows are stored again, apart from the others.
            cuts.add(segment_slice.stop // unit * unit)
            break
        chain.append(segment_slice)

        begin = segment_slice.stop
    if chain and (
        begin < stored_state.stop or begin < chain[-1].end
    ):  # of a page that prompts share in part, each has its own
        begin -= begin % unit
        chain = [
            replace(segment_slice, stop=min(segment_slice.stop, begin))
            for segment_slice in chain
            if segment_slice.start < begin
        ]
    # Rows between the stored prefix and this part are missing.
    if begin < stored_state.first:
        raise WriteRefused("parent")

    row = stored_state.tensor.nbytes / max(1, stored_state.stop - stored_state.first)
    segments = cut(meta, keys, begin, stored_state.stop, int(row), cuts, max(unit, BLOCK_TOKENS))
    tensors = [
        stored_state.tensor.rows(segment.start - stored_state.first, segment.stop - stored_state.first)
        for segment in segments
    ]
    # Only a prompt that is there to its end can be found by its id.
    last = stored_state.stop == meta.num_tokens
    about = encode_meta(replace(meta, nbytes=round(row * meta.num_tokens))) if last else None
    if about is not None and shared:  # those who share the objects have no other way to know of the prompt
        segments.append(
            Segment(
                "", meta.partition, meta.epoch, RECORD, 0, 0,
                record=meta.id, created=meta.created, ttl=meta.ttl, about=about,
            )
        )  # fmt: skip
        tensors.append(Tensor(np.zeros(0, np.uint8), "U8"))
    return _RecordWrite(meta, about, chain, segments, tensors)


def _rows(
    sql: sqlite3.Connection, objects: Objects, budget: Budget, record_write: _RecordWrite, segments: list[Segment]
) -> Written:
    meta, slices = record_write.meta, list(record_write.chain)
    # They were read outside of this transaction, and may have been evicted since.
    if not all(changes.is_there(sql, segment_slice.n) for segment_slice in slices):
        raise TryAgain
    for segment in segments:
        n = index(sql, objects, segment)
        slices.append(
            SegmentSlice(n, segment.name, segment.start, segment.stop, segment.stop, segment.due, segment.record)
        )

    removal, evicted = Removal(), list[tuple[str, str]]()
    if record_write.about is not None:
        columns = (meta.id, meta.partition, meta.epoch, meta.kind)
        removal += changes.add_record(sql, record_write.about, columns, meta.created, _due(meta), slices)
    numbers = tuple(segment_slice.n for segment_slice in slices)
    # Before room is made: what was just stored must not be what leaves.
    changes.touch(sql, {("", numbers): 1})
    for limit_partition, nbytes, entries in budget.limits(meta.partition):
        limit_name = "quota" if limit_partition is not None else "bytes" if nbytes else "entries"
        room = changes.make_room(sql, POLICIES[budget.policy], nbytes, entries, limit_partition, set(numbers), meta.id)
        evicted.extend((partition, limit_name) for _, partition in room.records)
        removal += room
    return removal, evicted


def index(sql: sqlite3.Connection, objects: Objects, segment: Segment) -> int:
    """Adds the row of an object that was just written; its number. Raises: TryAgain if it has left."""
    # A process that opened the store meanwhile took it for one left over, and indexed or removed it. A service is not asked: lookups would
    # wait for its answer, and what another machine removed is found missing.
    segment_row = sql.execute("SELECT n FROM segments WHERE name = ?", (segment.name,)).fetchone()
    leaves = sql.execute("SELECT 1 FROM leaving WHERE name = ?", (segment.name,)).fetchone()

    if segment_row is None and (leaves or not (objects.shared or is_there(objects, segment.name))):
        raise TryAgain
    return segment_row[0] if segment_row else changes.add_segment(sql, segment)


def _due(meta: ChunkMeta) -> float:
    return meta.created + meta.ttl if meta.ttl else NEVER


def undo(objects: Objects, catalog: Catalog, segments: Iterable[Segment]) -> None:
    """Remove objects of a failed change. If its outcome is unknown, they are indexed or removed at the next opening."""
    try:
        query = "SELECT 1 FROM segments WHERE name = ?"
        if orphan_names := [segment.name for segment in segments if not catalog.read(query, (segment.name,))]:
            objects.delete(orphan_names)
    except (StoreUnavailable, sqlite3.Error) as error:
        logger.info("objects without a row are left: %s", error)
