"""Removes records with the rows that no other record has, and chooses what a purge takes."""

import secrets
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from dejakv.store import changes
from dejakv.store.base import CorruptChunk
from dejakv.store.catalog import Catalog, reason_of
from dejakv.store.changes import Removal, SharedSegment
from dejakv.store.counters import logger
from dejakv.store.keys import ends_of
from dejakv.store.objects import ObjectMissing, Objects, StoreUnavailable
from dejakv.store.segment import Segment, encode, opened
from dejakv.store.selection import Selection
from dejakv.store.writing import TryAgain, index, undo

Choose = Callable[[sqlite3.Connection], tuple[list[int], list[int]]]
"""Names records and segments by number."""


class _DryRun(Exception):
    """Ends a transaction without a change."""


def remove(objects: Objects, catalog: Catalog, choose: Choose, *, dry_run: bool = False) -> Removal:
    """Remove the records and segments that `choose` names, with the rows of no other record. Rows that others share with a leaving segment
    are stored anew. Raises: sqlite3.Error, Unknown"""
    shared_copies: dict[SharedSegment, Segment | None] = {}
    try:
        return _remove(objects, catalog, choose, shared_copies, dry_run)
    except sqlite3.Error as error:
        if reason_of(error) not in ("full", "error"):
            raise
        # The log cannot grow where the disk is full: what is in it is written back.
        with suppress(sqlite3.Error):
            catalog.empty_log()

        return _remove(objects, catalog, choose, shared_copies, dry_run, full=True)
    finally:
        # After a success this removes nothing: their rows are in the catalog.
        undo(objects, catalog, filter(None, shared_copies.values()))


def _remove(
    objects: Objects,
    catalog: Catalog,
    choose: Choose,
    shared_copies: dict[SharedSegment, Segment | None],
    dry_run: bool,
    full: bool = False,
) -> Removal:
    """See `remove`. `shared_copies`: segments stored anew; None if that failed. `full`: the disk has no room for the commit."""
    removal = Removal()
    # Again until no new shared segment turns up: other processes store meanwhile.
    while True:
        try:
            with catalog.transaction() as sql:
                records, segments = choose(sql)
                shared_segments = [] if dry_run else changes.torn(sql, records)
                uncopied = [shared_segment for shared_segment in shared_segments if shared_segment not in shared_copies]
                if not uncopied:
                    for shared_segment in shared_segments:
                        _move(sql, objects, shared_segment, shared_copies[shared_segment], records)
                    removal = changes.remove(sql, records, segments, tear=not dry_run)
                    if dry_run:
                        # Rolls back: what leaves is known exactly, and nothing has changed.
                        raise _DryRun
                    # Before the commit, to make room for it: should it fail, those rows lack objects.
                    if full:
                        objects.delete(removal.objects)
        except _DryRun:
            return removal
        except TryAgain:
            undo(objects, catalog, filter(None, shared_copies.values()))
            # A new object has left again: all are stored once more.
            shared_copies.clear()
            continue
        if not uncopied:
            return removal
        for shared_segment in uncopied:  # within a transaction lookups would wait for a service's answers
            shared_copies[shared_segment] = _store_beginning(objects, shared_segment)


def loose(
    sql: sqlite3.Connection, selection: Selection, ids: Sequence[str], records: Collection[int], now: float
) -> list[int]:
    """Segments without a record that a purge of these records takes: of prompts that have left, or were never finished."""
    free = "NOT EXISTS (SELECT 1 FROM links WHERE segment = s.n)"
    if not selection.donors and not selection.media:
        rows = sql.execute(f"SELECT n, partition, epoch, created FROM segments s WHERE {free}").fetchall()
        return [n for n, row_partition, epoch, born in rows if selection.takes(row_partition, epoch, born, now)]

    segments: set[int] = set()
    for id in {*selection.donors, *ids}:
        query = f"SELECT n FROM segments s WHERE record = ? AND (?2 IS NULL OR partition = ?2) AND {free}"
        segments |= {n for (n,) in sql.execute(query, (id, selection.partition))}
    linked_segments = [
        n for record in records for (n,) in sql.execute("SELECT segment FROM links WHERE record = ?", (record,))
    ]
    # What continues a removed prompt holds its text too.
    ends = [n for n in linked_segments if not changes.needed(sql, n, records)]
    return sorted(segments | changes.below(sql, [*segments, *ends]))


def _store_beginning(objects: Objects, shared_segment: SharedSegment) -> Segment | None:
    """Store the rows of other records as a new object; None if that is impossible."""
    try:
        whole, tensor = opened(objects.get(shared_segment.name), shared_segment.name)
        ends = [end for end in ends_of(whole.start, whole.stop, whole.spans) if end <= shared_segment.stop]
        # A prefix without a name cannot be looked up, so its rows would serve nobody.
        if not ends or ends[-1] != shared_segment.stop:
            return None
        part = replace(
            whole, name=secrets.token_hex(16), stop=shared_segment.stop, keys=whole.keys[: len(ends)], record=shared_segment.record,
            spans=tuple(span for span in whole.spans if span.start < shared_segment.stop),
            ids=whole.ids[: 4 * (shared_segment.stop - whole.start)],
        )  # fmt: skip
        part, buffers = encode(part, tensor.rows(0, shared_segment.stop - whole.start))
        objects.put(part.name, buffers)
    except (CorruptChunk, ObjectMissing, StoreUnavailable) as error:
        logger.warning("rows that prompts share leave with one of them: %s", error)
        return None

    return part


def _move(
    sql: sqlite3.Connection,
    objects: Objects,
    shared_segment: SharedSegment,
    part: Segment | None,
    leaving: Collection[int],
) -> None:
    """Gives the records that stay their rows in the new object. Raises: TryAgain"""
    if part is None:
        return
    new = index(sql, objects, part)
    surviving_records = [
        n for (n,) in sql.execute("SELECT record FROM links WHERE segment = ?", (shared_segment.n,)) if n not in leaving
    ]
    query = "UPDATE links SET segment = ? WHERE segment = ? AND record = ?"
    sql.executemany(query, [(new, shared_segment.n, record) for record in surviving_records])
