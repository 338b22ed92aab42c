"""Writing of states: first the objects, then their rows in one transaction."""

import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dejakv.errors import InputError, StoreError
from dejakv.identity import BLOCK_TOKENS, exact_key
from dejakv.store import changes
from dejakv.store.base import (
    AXIS,
    KV,
    SAVED_TOKENS,
    SNAPSHOT,
    RawTensor,
    StateInfo,
    StoredState,
    check_tensor,
    encode_meta,
)
from dejakv.store.budgets import POLICIES, Budget, NoRoom
from dejakv.store.catalog import Catalog, SegmentSlice
from dejakv.store.changes import Removal, Uses
from dejakv.store.counters import logger
from dejakv.store.objects import Objects, StoreUnavailable
from dejakv.store.prefix_keys import PrefixKeys
from dejakv.store.reconcile import object_exists
from dejakv.store.segment import DESCRIPTION, NEVER, Segment, cut_segments, encode, new_segment_name
from dejakv.store.selection import DONORS, PROMPT


class WriteRefused(StoreError):
    """A state is not taken; the text is the reason."""


class TryAgain(Exception):
    """Rows on which a transaction counts have left the store."""


Written = tuple[Removal, list[tuple[str, str]]]
"""What left for a put, and partition and limit of each evicted entry."""


@dataclass(frozen=True)
class _EntryWrite:
    """An entry to write, with its present slices and its new segments.

    Attributes
    ----------
    meta : StateInfo
        Description of the entry.
    about : bytes | None
        The description encoded; None for a prompt whose last part has not come.
    chain : list[SegmentSlice]
        Slices that are stored already.
    segments : list[Segment]
        Segments to write, without names.
    tensors : list[RawTensor]
        Their states.
    """

    meta: StateInfo
    about: bytes | None
    chain: list[SegmentSlice]
    segments: list[Segment]
    tensors: list[RawTensor]


def write(
    objects: Objects,
    catalog: Catalog,
    budget: Budget,
    stored_state: StoredState,
    now: float,
    uses: Uses,
    purges: int = 0,
) -> Written:
    """Store a state, and note `uses`.

    Of a prompt's exact state only the part behind stored prefixes is written. Nothing has changed
    if it raises.

    Parameters
    ----------
    objects : Objects
        Where the segments are put.
    catalog : Catalog
        Where they are indexed.
    budget : Budget
        Limits, to which others are evicted.
    stored_state : StoredState
        The state.
    now : float
        Seconds since 1970.
    uses : Uses
        Uses to note before room is made.
    purges : int
        Purges of shared objects known by now (see `Segment`).

    Raises
    ------
    WriteRefused
        If the state is invalid, too large, or not behind a stored part of its prompt.
    sqlite3.Error, StoreUnavailable
        If the catalog or the objects cannot be written.
    StoreError, InputError
        For a tensor or a description that cannot be encoded.
    """
    check_tensor(stored_state.tensor)
    meta = replace(
        stored_state.meta,
        nbytes=stored_state.tensor.nbytes,
        created=stored_state.meta.created or now,
    )
    if stored_state.rows is not None and not _is_exact(stored_state):
        raise WriteRefused("invalid")

    # Again if stored prefixes it counted on have left before the transaction.
    while True:
        entry_write = (
            _plan_prompt(catalog, meta, stored_state, now, objects.shared)
            if _is_exact(stored_state)
            else _plan_standalone(meta, stored_state)
        )
        needed_bytes = len(entry_write.about or b"") + sum(
            tensor.nbytes for tensor in entry_write.tensors
        )
        if any(0 < limit.max_bytes < needed_bytes for limit in budget.limits(meta.partition)):
            raise WriteRefused("too_large")

        segments: list[Segment] = []
        try:
            for segment, tensor in zip(entry_write.segments, entry_write.tensors, strict=True):
                encoded, parts = encode(
                    replace(segment, name=new_segment_name(), purges=purges), tensor
                )
                # Before `put`, whose failure may still leave an object to undo.
                segments.append(encoded)
                # Before the rows: there is never a row without its object.
                objects.put(encoded.name, parts)

            with catalog.transaction() as sql:
                changes.touch(sql, uses)
                return _write_rows(sql, objects, budget, entry_write, segments)
        except BaseException as error:
            undo(objects, catalog, segments)
            if isinstance(error, NoRoom):
                raise WriteRefused("too_large") from error
            if not isinstance(error, TryAgain):
                raise


def _is_exact(stored_state: StoredState) -> bool:
    """Return whether it is exact state of the prompt named by its id, row by row.

    Only such state is shared.
    """
    meta, shape = stored_state.meta, stored_state.tensor.shape
    if meta.kind != KV or meta.position or meta.generation or len(shape) != 5 or not meta.token_ids:
        return False
    if (
        not 0 <= stored_state.first < stored_state.stop <= meta.num_tokens
        or stored_state.first % _cut_unit(stored_state)
    ):
        return False

    if shape[AXIS] != -((stored_state.first - stored_state.stop) // stored_state.tensor.page):
        return False
    try:
        # The caller's word is not enough: a wrong id would serve other prompts wrong state.
        return meta.id == exact_key(
            meta.partition, meta.epoch, meta.token_ids, [span.digest for span in meta.spans]
        )
    except InputError:
        return False


def _cut_unit(stored_state: StoredState) -> int:
    """Return the number of rows at whose multiples a state may be cut.

    A state of pages is cut where a page ends at the end of a block.
    """
    return math.lcm(stored_state.tensor.page, BLOCK_TOKENS) if stored_state.tensor.page > 1 else 1


def _plan_standalone(meta: StateInfo, stored_state: StoredState) -> _EntryWrite:
    """Plan rows of a blend, or a named tensor: one segment without keys."""
    tensor = stored_state.tensor
    meta = replace(meta, nbytes=tensor.nbytes)
    about = encode_meta(meta)
    start, stop = 0, tensor.shape[AXIS] if len(tensor.shape) > AXIS else 0
    # Of the tokens that it saves no rows are stored, but eviction goes by their number.
    if meta.kind == SNAPSHOT:
        start, stop = max(0, meta.position - meta.metadata.get(SAVED_TOKENS, 0)), meta.position
    segment = Segment(
        "", meta.partition, meta.epoch, meta.kind, start, stop, entry_id=meta.id,
        position=meta.position, generation=meta.generation,
        lineage=(*meta.metadata.get(DONORS, ()), meta.metadata.get(PROMPT, "")),
        created=meta.created, ttl=meta.ttl, about=about,
    )  # fmt: skip
    return _EntryWrite(meta, about, [], [segment], [tensor])


def _plan_prompt(
    catalog: Catalog, meta: StateInfo, stored_state: StoredState, now: float, shared: bool
) -> _EntryWrite:
    keys = PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans)
    chain, cuts, begin, unit = list[SegmentSlice](), set[int](), 0, _cut_unit(stored_state)
    for segment_slice in catalog.longest_prefix(keys, stored_state.stop, now, partial_block=False):
        if segment_slice.stop < segment_slice.end and segment_slice.due < _due(meta):
            # It leaves before this prompt does: its rows are stored again, apart from the others.
            cuts.add(segment_slice.stop // unit * unit)
            break
        chain.append(segment_slice)
        begin = segment_slice.stop

    # Of a page that prompts share in part, each prompt has a copy.
    if chain and (begin < stored_state.stop or begin < chain[-1].end):
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
    segments = cut_segments(
        meta, keys, begin, stored_state.stop, int(row), cuts, max(unit, BLOCK_TOKENS)
    )
    tensors = [
        stored_state.tensor.rows(
            segment.start - stored_state.first, segment.stop - stored_state.first
        )
        for segment in segments
    ]

    # Only a prompt that is there to its end can be found by its id.
    last = stored_state.stop == meta.num_tokens
    about = encode_meta(replace(meta, nbytes=round(row * meta.num_tokens))) if last else None
    # Machines that share the objects have no other way to learn of the prompt.
    if about is not None and shared:
        segments.append(
            Segment(
                "", meta.partition, meta.epoch, DESCRIPTION, 0, 0,
                entry_id=meta.id, created=meta.created, ttl=meta.ttl, about=about,
            )
        )  # fmt: skip
        tensors.append(RawTensor(np.zeros(0, np.uint8), "U8"))

    return _EntryWrite(meta, about, chain, segments, tensors)


def _write_rows(
    sql: sqlite3.Connection,
    objects: Objects,
    budget: Budget,
    entry_write: _EntryWrite,
    segments: list[Segment],
) -> Written:
    meta, slices = entry_write.meta, list(entry_write.chain)
    # They were read outside of this transaction, and may have been evicted since.
    if not all(changes.has_segment(sql, segment_slice.n) for segment_slice in slices):
        raise TryAgain

    for segment in segments:
        n = index_object(sql, objects, segment)
        slices.append(
            SegmentSlice(
                n,
                segment.name,
                segment.start,
                segment.stop,
                segment.stop,
                segment.due,
                segment.entry_id,
            )
        )

    removal, evicted = Removal(), list[tuple[str, str]]()
    if entry_write.about is not None:
        columns = (meta.id, meta.partition, meta.epoch, meta.kind)
        removal += changes.add_entry(
            sql, entry_write.about, columns, meta.created, _due(meta), slices
        )

    numbers = tuple(segment_slice.n for segment_slice in slices)

    # Before room is made: what was just stored must not be what leaves.
    changes.touch(sql, {("", numbers): 1})
    for limit in budget.limits(meta.partition, meta.kind):
        room = changes.make_room(sql, POLICIES[budget.policy], limit, set(numbers), meta.id)
        evicted.extend((partition, limit.reason) for _, partition in room.entries)
        removal += room

    return removal, evicted


def index_object(sql: sqlite3.Connection, objects: Objects, segment: Segment) -> int:
    """Index an object that was just written, and return its number.

    Raises
    ------
    TryAgain
        If the object has left.
    """
    # A process that opened the store meanwhile took it for one left over, and indexed or removed
    # it. A service is not asked: lookups would wait for its answer, and what another machine
    # removed is found missing.
    segment_row = sql.execute("SELECT n FROM segments WHERE name = ?", (segment.name,)).fetchone()
    leaves = sql.execute("SELECT 1 FROM leaving WHERE name = ?", (segment.name,)).fetchone()

    if segment_row is None and (
        leaves or not (objects.shared or object_exists(objects, segment.name))
    ):
        raise TryAgain

    return segment_row[0] if segment_row else changes.add_segment(sql, segment)


def _due(meta: StateInfo) -> float:
    return meta.created + meta.ttl if meta.ttl else NEVER


def undo(objects: Objects, catalog: Catalog, segments: Iterable[Segment]) -> None:
    """Remove the objects of a failed change that have no rows.

    If the outcome of the change is unknown, they are indexed or removed at the next opening.
    """
    try:
        query = "SELECT 1 FROM segments WHERE name = ?"
        if orphan_names := [
            segment.name for segment in segments if not catalog.read(query, (segment.name,))
        ]:
            objects.delete(orphan_names)
    except (StoreUnavailable, sqlite3.Error) as error:
        logger.info("objects without a row are left: %s", error)
