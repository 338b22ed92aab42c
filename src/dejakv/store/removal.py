"""Removal of entries with the rows that no other entry has, and of their objects and traces."""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from dejakv.errors import StoreError
from dejakv.store import changes
from dejakv.store.base import CorruptState, StateInfo, decode_meta
from dejakv.store.budgets import Clock
from dejakv.store.catalog import Catalog, reason_of
from dejakv.store.changes import Removal, SharedSegment
from dejakv.store.counters import EntryListeners, logger
from dejakv.store.objects import ObjectMissing, Objects, StoreUnavailable
from dejakv.store.prefix_keys import ends_of
from dejakv.store.segment import Segment, encode, new_segment_name, open_object
from dejakv.store.selection import PurgeResult, Selection, count_purged, select_entries
from dejakv.store.writing import TryAgain, index_object, undo

Choose = Callable[[sqlite3.Connection], tuple[list[int], list[int]]]
"""Names the entries and segments to remove, by number, within the transaction."""


class _DryRun(Exception):
    """Ends a transaction without a change."""


def remove(objects: Objects, catalog: Catalog, choose: Choose, *, dry_run: bool = False) -> Removal:
    """Remove entries and segments, with the rows that no other entry has.

    Rows that other entries share with a leaving segment are stored anew. Where that fails, these
    entries leave, too.

    Parameters
    ----------
    objects : Objects
        Objects of the segments. The caller deletes those of `Removal.objects`.
    catalog : Catalog
        Their rows.
    choose : Choose
        Names the entries and segments. It may be called several times.
    dry_run : bool
        Change nothing.

    Returns
    -------
    Removal
        What has left, or would leave.

    Raises
    ------
    sqlite3.Error
        If the catalog cannot be written.
    StoreUnavailable
        If the disk is full and objects cannot be deleted to make room.
    """
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
    """Remove as `remove` does.

    Parameters
    ----------
    shared_copies : dict[SharedSegment, Segment | None]
        Segments stored anew, filled here; None if that failed.
    full : bool
        Whether the disk has no room for the commit.
    """
    removal = Removal()
    # Again until no new shared segment turns up: other processes store meanwhile.
    while True:
        try:
            with catalog.transaction() as sql:
                entries, segments = choose(sql)
                shared_segments = [] if dry_run else changes.find_shared_segments(sql, entries)
                uncopied = [
                    shared_segment
                    for shared_segment in shared_segments
                    if shared_segment not in shared_copies
                ]
                if not uncopied:
                    for shared_segment in shared_segments:
                        _relink(
                            sql, objects, shared_segment, shared_copies[shared_segment], entries
                        )
                    removal = changes.remove(sql, entries, segments, tear=not dry_run)
                    if dry_run:
                        # Rolls back: what leaves is known exactly, and nothing has changed.
                        raise _DryRun
                    # Before the commit, to make room for it: should it fail, those rows lack
                    # objects.
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

        # Outside of a transaction, in which lookups would wait for a service's answers.
        for shared_segment in uncopied:
            shared_copies[shared_segment] = _store_beginning(objects, shared_segment)


def orphan_segments(
    sql: sqlite3.Connection,
    selection: Selection,
    ids: Sequence[str],
    entries: Collection[int],
    now: float,
) -> list[int]:
    """List the segments without an entry that a purge takes, by number.

    They are of prompts that have left or were never finished.

    Parameters
    ----------
    sql : sqlite3.Connection
        A transaction.
    selection : Selection
        What the purge takes.
    ids : Sequence[str]
        Ids of the entries that it takes.
    entries : Collection[int]
        Their numbers.
    now : float
        Seconds since 1970.
    """
    free = "NOT EXISTS (SELECT 1 FROM links WHERE segment = s.n)"
    if not selection.donors and not selection.media:
        rows = sql.execute(
            f"SELECT n, partition, epoch, created FROM segments s WHERE {free}"
        ).fetchall()
        return [
            n
            for n, row_partition, epoch, born in rows
            if selection.covers(row_partition, epoch, born, now)
        ]

    segments: set[int] = set()
    for id in {*selection.donors, *ids}:
        query = (
            "SELECT n FROM segments s WHERE record = ? AND (?2 IS NULL OR partition = ?2) AND "
            f"{free}"
        )
        segments |= {n for (n,) in sql.execute(query, (id, selection.partition))}

    linked_segments = [
        n
        for entry in entries
        for (n,) in sql.execute("SELECT segment FROM links WHERE record = ?", (entry,))
    ]

    # What continues a removed prompt holds its text too.
    ends = [n for n in linked_segments if not changes.is_needed(sql, n, entries)]
    return sorted(segments | changes.unneeded_continuations(sql, [*segments, *ends]))


def _store_beginning(objects: Objects, shared_segment: SharedSegment) -> Segment | None:
    """Store the rows that other entries need as a new object; None if that is impossible."""
    try:
        whole, tensor = open_object(objects.get(shared_segment.name), shared_segment.name)
        ends = [
            end
            for end in ends_of(whole.start, whole.stop, whole.spans)
            if end <= shared_segment.stop
        ]
        # A prefix without a name cannot be looked up, so its rows would serve nobody.
        if not ends or ends[-1] != shared_segment.stop:
            return None
        part = replace(
            whole, name=new_segment_name(), stop=shared_segment.stop,
            keys=whole.keys[: len(ends)], entry_id=shared_segment.entry_id,
            spans=tuple(span for span in whole.spans if span.start < shared_segment.stop),
            ids=whole.ids[: 4 * (shared_segment.stop - whole.start)],
        )  # fmt: skip

        part, buffers = encode(part, tensor.rows(0, shared_segment.stop - whole.start))
        objects.put(part.name, buffers)
    except (CorruptState, ObjectMissing, StoreUnavailable) as error:
        logger.warning("rows that prompts share leave with one of them: %s", error)
        return None

    return part


def _relink(
    sql: sqlite3.Connection,
    objects: Objects,
    shared_segment: SharedSegment,
    part: Segment | None,
    leaving: Collection[int],
) -> None:
    """Give the remaining entries their rows in the new object.

    Raises
    ------
    TryAgain
        If the new object has left.
    """
    if part is None:
        return
    new = index_object(sql, objects, part)
    surviving_entries = [
        n
        for (n,) in sql.execute("SELECT record FROM links WHERE segment = ?", (shared_segment.n,))
        if n not in leaving
    ]
    query = "UPDATE links SET segment = ? WHERE segment = ? AND record = ?"
    sql.executemany(query, [(new, shared_segment.n, entry) for entry in surviving_entries])


class EntryRemoval:
    """Removal of a store's entries: their rows first, then their objects; then listeners learn it.

    Parameters
    ----------
    objects : Objects
        Objects of the segments.
    catalog : Catalog
        Their rows.
    clock : Clock
        Seconds since 1970.
    forget : Callable[[Iterable[str]], None]
        Called with the names of removed objects, which nobody must read from memory any more.
    listeners : EntryListeners
        Called with the id of each removed entry.
    wake : Callable[[], None] | None
        Wakes the thread that removes traces; None without one.
    remote : bool
        Whether the objects are those of a service, for which no read waits.

    Attributes
    ----------
    traces : bool
        Whether objects of removed entries, or their text in the log of the catalog, are left.
    closed : bool
        Whether the thread has ended.
    """

    def __init__(
        self,
        objects: Objects,
        catalog: Catalog,
        clock: Clock,
        forget: Callable[[Iterable[str]], None],
        listeners: EntryListeners,
        *,
        wake: Callable[[], None] | None,
        remote: bool,
    ) -> None:
        self._objects, self._catalog, self._clock = objects, catalog, clock
        self._forget, self._listeners = forget, listeners
        self._wake, self._remote = wake, remote
        self.traces = self.closed = False

    def delete(self, id: str) -> Removal:
        """Remove an entry; see `Store.delete`.

        Raises
        ------
        sqlite3.Error, StoreUnavailable
            If it cannot be removed.
        """
        query = "SELECT n FROM records WHERE id = ?"
        return self._remove(lambda sql: ([n for (n,) in sql.execute(query, (id,))], []))

    def clear(self, partition: str | None) -> Removal:
        """Remove all entries of a partition, or all; see `Store.clear`.

        Raises
        ------
        sqlite3.Error, StoreUnavailable
            If they cannot be removed.
        """
        query = "SELECT n FROM {} WHERE ?1 IS NULL OR partition = ?1"

        def numbers_of(sql: sqlite3.Connection, table_name: str) -> list[int]:
            return [n for (n,) in sql.execute(query.format(table_name), (partition,))]

        return self._remove(lambda sql: (numbers_of(sql, "records"), numbers_of(sql, "segments")))

    def sweep(self) -> int:
        """Remove what expired; see `Store.sweep`."""
        removal = self._remove(lambda sql: changes.expired(sql, self._clock()))
        self.traces = self.traces or bool(removal.entries or removal.objects)
        if self.traces:
            # Before the work: what leaves meanwhile sets it again.
            self.traces = False
            try:
                self._delete_objects()
                self._catalog.empty_log()
            except (sqlite3.Error, StoreUnavailable) as error:
                self.traces = True
                logger.warning("traces of removed entries are deleted later: %s", error)

        return len(removal.entries)

    def purge(
        self,
        selection: Selection,
        decode: Callable[[int, bytes], StateInfo | None],
        *,
        dry_run: bool = False,
    ) -> PurgeResult:
        """Remove the selected entries and everything derived from them; see `Store.purge`.

        Parameters
        ----------
        decode : Callable[[int, bytes], StateInfo | None]
            Decodes the description of an entry, None for a damaged one.
        """
        selected: list[StateInfo] = []
        parts: list[int] = []

        def choose(sql: sqlite3.Connection) -> tuple[list[int], list[int]]:
            query = "SELECT n, about FROM records WHERE ?1 IS NULL OR partition = ?1"
            rows = sql.execute(query, (selection.partition,)).fetchall()
            metas_by_number = {n: decode(n, about) for n, about in rows}
            numbers = {meta.id: n for n, meta in metas_by_number.items() if meta is not None}
            selected[:] = select_entries(
                [meta for meta in metas_by_number.values() if meta is not None],
                selection,
                self._clock(),
            )
            damaged = [n for n, meta in metas_by_number.items() if meta is None]
            entries = [*damaged, *(numbers[meta.id] for meta in selected)]
            parts[:] = orphan_segments(
                sql, selection, [meta.id for meta in selected], entries, self._clock()
            )
            return entries, parts

        remains = "entries"
        try:
            removal = self._remove(choose, dry_run=dry_run)
            if not dry_run:
                # The cache keeps decoded prompts, and would keep the purged ones in memory.
                decode_meta.cache_clear()
                self._delete_objects()
                remains = "text of removed entries in catalog.sqlite-wal"
                # The write-ahead log still holds the removed rows' bytes.
                self._catalog.empty_log()
        except (sqlite3.Error, StoreUnavailable) as error:
            why = error.reason if isinstance(error, StoreUnavailable) else reason_of(error)
            remedy = {"full": "make room on its disk", "busy": "end the process that uses it"}.get(
                why, "make the store writable"
            )
            raise StoreError(
                f"{remains} could not be removed ({error}): {remedy} and purge again"
            ) from error

        return replace(count_purged(selected), parts=len(parts), bytes=removal.nbytes)

    def _remove(self, choose: Choose, *, dry_run: bool = False) -> Removal:
        """See `removal.remove`."""
        removal = remove(self._objects, self._catalog, choose, dry_run=dry_run)
        if not dry_run:
            self.finish(removal)
        return removal

    def finish(self, removal: Removal, *, during_read: bool = False) -> None:
        """Forget removed entries, delete their objects and tell the listeners.

        Call it after the commit, without a lock.

        Parameters
        ----------
        removal : Removal
            What has left.
        during_read : bool
            Whether a read noticed it: no request waits for a service, so the worker deletes the
            objects.
        """
        self._forget(removal.objects)
        if removal.objects and during_read and self._remote and self._wake and not self.closed:
            self._delete_later()
        elif removal.objects:
            try:
                self._delete_objects()
            except (sqlite3.Error, StoreUnavailable) as error:
                if not self.traces:
                    logger.warning("files of removed entries are deleted later: %s", error)
                self._delete_later()

        self._listeners.notify(id for id, _ in removal.entries)

    def _delete_later(self) -> None:
        self.traces = True
        if self._wake is not None:
            self._wake()

    def _delete_objects(self) -> None:
        """Delete the objects of all removed segments, of any process.

        Raises
        ------
        sqlite3.Error, StoreUnavailable
            If the catalog or the objects cannot be changed.
        """
        names = self._catalog.objects_to_delete()
        self._objects.delete(names)
        self._catalog.note_deleted(names)
