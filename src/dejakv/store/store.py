"""The store: segments of computed state, a catalog to find them, and one writer thread.

    store.put(chunk); store.find(partition, epoch, token_ids); store.get(id); store.purge(Selection(partition="p"))

Exact state is cut into segments of at most 256 tokens and stored without those of a stored prefix. A prefix is found by the names of
its blocks, whoever stored it.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cachetools import FIFOCache

from dejakv.errors import InputError, StoreError
from dejakv.identity import BLOCK_TOKENS, common_prefix
from dejakv.store import changes
from dejakv.store.background import After, BackgroundWorker, Capture, Complete, QueuedState, WriterStats
from dejakv.store.base import (
    KV,
    ChunkMeta,
    CorruptChunk,
    PrefixHit,
    Rows,
    StoredState,
    StoreStats,
    Tensor,
    check_alike,
    joined,
)
from dejakv.store.budgets import Admission, AdmissionGate, Budget, Clock, is_expired
from dejakv.store.budgets import now as steady
from dejakv.store.catalog import Catalog, SegmentSlice, reason_of
from dejakv.store.changes import PendingNotes, Removal
from dejakv.store.counters import FAILED_WRITES, EntryListeners, StoreCounters, logger
from dejakv.store.forks import fork_safe_lock
from dejakv.store.keys import PREFIX, PrefixKeys, prefix_id, prefix_of
from dejakv.store.objects import Bytes, MemoryObjects, ObjectMissing, Objects, ReadTimeout, StoreUnavailable
from dejakv.store.reconcile import News, reconcile
from dejakv.store.records import decode_meta
from dejakv.store.remote.feed import LIST, ChangeFeed
from dejakv.store.remote.replicas import ReplicaFollower
from dejakv.store.remote.tiers import TieredObjects
from dejakv.store.removal import Choose, loose, remove
from dejakv.store.segment import dequantized, opened
from dejakv.store.selection import PurgeResult, Selection, chosen, counted
from dejakv.store.writing import WriteRefused, write

_VERIFIED = 4096


class Store:
    """Thread-safe store of computed state; any number of processes may share a folder and its budgets. Open with `open_store`.

    Reading never raises and never waits for a writer: missing, expired and damaged chunks are None and counted. A failed write
    (full, slow, read-only) returns False and is counted by reason. A segment is verified at the first read of this process, and after a
    change of its file. Uses are noted in batches: a killed process loses the last ones.

    clock       seconds since 1970
    background  False: nothing expires but by `sweep`
    queue       maximum waiting submissions: few, because each keeps its state in memory
    feed        tells what other machines put into and took out of shared objects
    release     called by `close`
    """

    def __init__(
        self,
        objects: Objects | None = None,
        catalog: Catalog | None = None,
        budget: Budget | None = None,
        admission: Admission | None = None,
        *,
        clock: Clock = steady,
        background: bool = True,
        queue: int = 32,
        feed: ChangeFeed | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects = objects or MemoryObjects()
        self._far = self._objects if isinstance(self._objects, TieredObjects) and self._objects.shared else None
        self._stones = self._far.tombstones if self._far is not None else None
        self._catalog = catalog or Catalog(None)
        self._budget = budget or Budget()
        self._gate = AdmissionGate(admission or Admission())
        self._clock = clock
        self._background = background
        self._release = release

        self._lock = fork_safe_lock()
        self._counters = StoreCounters(self._lock)
        self._listeners = EntryListeners()
        self._arrivals = EntryListeners()

        self._worker = BackgroundWorker(self._work, self._tick, queue)
        on_removal = partial(self._left, during_read=True)
        self._notes = PendingNotes(self._catalog, self._counters, on_removal, self._lock, self._objects.shared)
        self._verified: FIFOCache[str, tuple[Bytes, Tensor]] = FIFOCache(_VERIFIED)
        self._closed = self._warned = self._traces = False

        self._feed = feed
        self._follower: ReplicaFollower | None = None
        # Before the first lookup: the catalog may be older than the objects.
        self.catch_up()
        if self._objects.shared and background:
            self._follower = ReplicaFollower(self.catch_up, self._share_uses, feed)

    # Writing

    def wants(self, id: str, tokens: int, partition: str) -> bool:
        """Whether to capture this prompt's state. Ask before capturing: counts as a sight of the prompt, a no as a refusal."""
        with self._lock:
            reason = self._gate.unwanted(id, tokens)
        if reason is not None:
            self._counters.add("refused", partition, reason)
        return reason is None

    def put(self, stored_state: StoredState) -> bool:
        """Store a chunk; of exact state only the part behind a stored prefix. False if refused or failed.

        Parts of a prompt (`chunk.rows`) are found by the prompt's id after the last of them; before, as a prefix.
        """
        meta = stored_state.meta
        with self._lock:
            reason = "error" if self._closed else None
            # Later parts of a prompt are not asked again: its first one was admitted.
            reason = reason or (None if stored_state.first else self._gate.unwanted(meta.id, meta.num_tokens))
            reason = reason or self._gate.overrate(stored_state.tensor.nbytes, refuse=not stored_state.first)
        if reason is None:
            try:
                self._put(stored_state)
            except WriteRefused as error:
                reason = str(error)
            except StoreUnavailable as error:
                reason = error.reason
            except sqlite3.Error as error:
                reason = reason_of(error)
            except (StoreError, InputError, UnicodeError) as error:
                logger.warning("a chunk cannot be stored: %s", str(error))
                reason = "invalid"
        if reason is None:
            self._counters.add("puts", meta.partition)
            return True

        self._counters.add("refused", meta.partition, reason)
        if reason in FAILED_WRITES and not self._warned:
            self._warned = True
            logger.warning(
                "state is not stored (%s): see that there is space and that you may write; further failures are only counted",
                FAILED_WRITES[reason],
            )

        return False

    def submit(
        self,
        meta: ChunkMeta,
        capture: Capture,
        *,
        complete: Complete | None = None,
        after: After | None = None,
        at_once: bool = False,
        background: bool = True,
    ) -> bool:
        """Queue a chunk for storage; it can be found and read at once. Never waits and never raises.

        Returns False for a stored or unwanted prompt (`wants`), or if the queue is full (`outcomes.dropped`).

        capture     copies the state, None without any; called once, by the worker or an earlier reader
        at_once     call `capture` before returning, if the state may change afterwards
        complete    called before storage: returns the finished description, None to cancel
        after       called with the description after storage
        background  False: store before returning
        """
        # Of a named tensor the latest counts; a prompt's state is always the same.
        if meta.token_ids and (
            self.meta(meta.id) is not None or not self.wants(meta.id, meta.num_tokens, meta.partition)
        ):
            return False
        state = capture() if at_once else None
        item = QueuedState(meta, (lambda: state) if at_once else capture, complete, after)
        return self._worker.submit(item, background)

    @property
    def outcomes(self) -> WriterStats:
        """Outcomes of the submissions."""
        return self._worker.outcomes

    def flush(self) -> None:
        """Wait until earlier submissions are stored or refused, and uses are noted."""
        self._worker.flush()
        self._notes.settle(wait=True)

    def close(self) -> None:
        """Store the queue; later submissions are dropped."""
        if self._closed:
            return
        # Before `_closed` is set: what waits is still to be stored.
        self._worker.close()
        if self._follower is not None:
            self._follower.close()

        self._closed = True
        self._notes.settle(wait=True)
        self._catalog.close()
        self._verified.clear()
        self._objects.close()
        # Last: until here nobody else may delete or repair the store.
        self._release()

    # Reading

    def get(self, id: str, until: float | None = None) -> StoredState | None:
        """Return a chunk with all of its state, None if missing. `until`: see `get_parts`."""
        parts = self.get_parts(id, None, until)
        if not parts:
            return None
        meta = parts[0].meta
        if len(parts) == 1:
            return StoredState(meta, parts[0].tensor)
        tensor = joined(parts, 0, meta.num_tokens)
        return None if tensor is None else StoredState(meta, tensor)

    def get_parts(self, id: str, rows: Rows | None = None, until: float | None = None) -> Sequence[StoredState] | None:
        """Return the parts of a chunk that hold these rows (None: all), as stored: views, in order. None if missing.

        id     of a chunk, or of a prefix from `find`
        until  when to give up a read from a bucket, by `time.monotonic`; None: as the service's client does
        """
        # Queued state is exact already, and in memory.
        waiting = self._waiting(id)
        if waiting is not None:
            return (waiting,)
        meta = None
        try:
            # Evicted between lookup and read: the second lookup sees what is there now.
            for may_retry in (True, False):
                meta, slices = self._found(id)
                if meta is None:
                    break
                parts = self._load(meta, slices, rows, may_retry, until) if slices else None
                if parts is not None:
                    self._notes.used(id, [segment_slice.n for segment_slice in slices])
                    self._counters.add("hits", meta.partition)
                    return parts
            if meta is not None:
                self._notes.lose(id, [segment_slice.n for segment_slice in self._found(id)[1]])
        except ReadTimeout:
            self._counters.add("late", meta.partition if meta is not None else None)
        except sqlite3.Error as error:
            meta = None
            logger.warning("the catalog cannot be read: %s", error)

        self._counters.add("misses", meta.partition if meta is not None else None)
        return None

    def away(self, id: str, rows: Rows | None = None) -> float:
        """Estimate the seconds to read a chunk, or these rows, from a bucket, by the latest reads; 0 if it is on this machine."""
        if self._far is None or self._usable(id) is not None:
            return 0.0
        try:
            return self._far.away(self._catalog.sizes(_with_rows(self._found(id)[1], rows)))
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return 0.0

    def find(
        self, partition: str, epoch: str, token_ids: Sequence[int], spans: Sequence[Any] = (), *, whole: bool = False
    ) -> tuple[PrefixHit, ChunkMeta] | None:
        """Find the longest stored prefix, of at least a block and at most `len(token_ids) - 1` tokens (`whole`: one more). Returns it with
        the description of its prompt, or of the prefix alone if that prompt has left; None without one. Notes no use."""
        max_tokens = len(token_ids) - (not whole)
        best: tuple[PrefixHit, ChunkMeta] | None = None
        # The newest first: of two with the same length it counts.
        for queued_state in reversed(list(self._worker.queued.values())):
            meta = queued_state.meta
            if (meta.kind, meta.partition, meta.epoch) == (KV, partition, epoch) and self._usable(meta.id):
                tokens = min(common_prefix(token_ids, meta.token_ids, spans, meta.spans), max_tokens)
                if tokens >= BLOCK_TOKENS and (best is None or tokens > best[0].tokens):
                    best = PrefixHit(meta.id, tokens), meta
        try:
            self.notice()

            keys = PrefixKeys(partition, epoch, token_ids, spans)
            slices = self._catalog.longest(keys, max_tokens, self._clock())
        except (sqlite3.Error, InputError) as error:
            logger.warning("the catalog cannot be read: %s", error)
            return best
        tokens = slices[-1].stop if slices else 0
        if tokens < BLOCK_TOKENS or (best is not None and best[0].tokens >= tokens):
            return best
        meta = self.meta(slices[-1].record)
        if meta is None or meta.kind != KV:
            # What has a name: a chain is read by its names alone.
            slices = self._catalog.longest(keys, max_tokens, self._clock(), partial_block=False)
            tokens = slices[-1].stop if slices else 0
            if tokens < BLOCK_TOKENS:
                return best
            ids, before = tuple(token_ids[:tokens]), tuple(span for span in spans if span.start < tokens)
            meta = ChunkMeta(prefix_id(tokens, keys.at(tokens)), partition, epoch, ids, "", "", spans=before)

        return PrefixHit(meta.id, tokens), meta

    def meta(self, id: str) -> ChunkMeta | None:
        """Describe a chunk, or a prefix from `find` as far as it is known; None if missing."""
        item = self._usable(id)
        if item is not None:
            return item.meta
        try:
            return self._found(id, rows=False)[0]
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        """Descriptions of all chunks, queued ones first."""
        # An item may be stored while this runs, and would come twice.
        seen: set[str] = set()
        for item in list(self._worker.queued.values()):
            meta = item.meta
            if partition in (None, meta.partition) and epoch in (None, meta.epoch) and self._usable(meta.id):
                seen.add(meta.id)
                yield meta

        try:
            for row in self._catalog.records(partition, epoch, self._clock()):
                meta = None if row.id in seen or row.id in self._notes.lost else self._notes.decoded(row.n, row.about)
                if meta is not None:
                    yield meta
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        """Describe at least the chunks stored by any process since `mark` (None: all). Returns the next mark as well."""
        token, last = mark or ("", 0)
        # Another token: the catalog was rebuilt, and its numbers begin anew.
        last = last if token == self._catalog.token else 0
        metas: list[ChunkMeta] = []
        try:
            for row in self._catalog.records(None, None, self._clock(), after=last):
                last = row.n
                meta = self._notes.decoded(row.n, row.about)
                if meta is not None:
                    metas.append(meta)
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

        return metas, (self._catalog.token, last)

    def catch_up(self, news: News | None = None) -> bool:
        """Reconcile rows with objects, and meet the budget: what other machines put is found from then on. A store in a bucket does it
        again and again. False if the objects cannot be listed."""
        try:
            buried = None if self._stones is None else self._stones.buried
            # Purges first: what they take must not be indexed for a moment.
            for stone in self._stones.look() if self._stones is not None and news is None else ():
                self._purge(stone.selection)
            changed = reconcile(self._objects, self._catalog, self._budget, self._clock(), news, buried)
            due = self._catalog.next_due()
        except (StoreError, StoreUnavailable) as error:
            logger.warning("the store is not compared with its objects: %s", error)
            return False

        for partition, limit in changed.evicted:
            self._counters.add("evictions", partition, limit)
        self._left(changed.gone)
        if changed.damaged:
            logger.warning("%d damaged objects are removed", changed.damaged)
        if changed.untrue:
            logger.warning("%d headers in the feed are not their objects': the bucket was read instead", changed.untrue)
        for _ in range(changed.damaged + changed.untrue):
            self._counters.add("corrupt")

        self._arrivals.tell(changed.arrived)
        if due is not None and self._background:
            self._worker.wake()
        return True

    def touch(self, id: str, *, announce: bool = True) -> None:
        """Note a use without a read. `announce`: other machines are to be told of it."""
        try:
            self._notes.used(id, [segment_slice.n for segment_slice in self._found(id)[1]], announce=announce)
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

    def stats(self, partition: str | None = None) -> StoreStats:
        """Counters and absences, of one partition or of all."""
        try:
            entries, total_bytes = self._catalog.totals(partition)
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            entries = total_bytes = 0
        return replace(self._counters.stats(partition, entries, total_bytes), **self.absences())

    def absences(self) -> dict[str, float]:
        """For how long the bucket and the feed have failed, as in `StoreStats`."""
        services = {"bucket_away_seconds": self._far, "feed_away_seconds": self._feed}
        breakers = {name: source.breaker for name, source in services.items() if source is not None}
        return {name: source.away_seconds for name, source in breakers.items() if source is not None}

    def on_evict(self, listener: Callable[[str], None]) -> None:
        """Call `listener(id)` after an entry left the store (evicted, deleted, corrupt), by any process."""
        self._listeners.append(listener)

    def on_arrival(self, listener: Callable[[str], None]) -> None:
        """Call `listener(id)` after an entry of another machine was found, in the thread that looks for them."""
        self._arrivals.append(listener)

    def notice(self) -> bool:
        """Tell the listeners of entries removed by other processes. False if some may have been missed. Raises: sqlite3.Error"""
        news, complete = self._catalog.removed_elsewhere()
        if news or not complete:
            self._verified.clear()  # so that no map keeps the bytes of what others removed
            self._listeners.tell(id for id, back in news if not back)
        return complete

    # Removing

    def delete(self, id: str) -> bool:
        """Remove an entry with the rows of no other prompt; of a prefix from `find`, its last segment. False if missing, or if that
        failed."""
        prefix = prefix_of(id)
        if prefix is not None:
            for segment_slice in self._catalog.chain(*prefix, self._clock())[-1:]:
                self._notes.damaged(segment_slice.n, "it is not wanted")
            return True
        # First the queue, then the catalog: in between the worker could store it.
        was_queued = self._worker.drop(id)
        try:
            query = "SELECT n FROM records WHERE id = ?"
            removal = self._remove(lambda sql: ([n for (n,) in sql.execute(query, (id,))], []))
        except (sqlite3.Error, StoreUnavailable, UnicodeError) as error:
            logger.warning("chunk %s cannot be deleted: %s", id, error)
            return was_queued

        was_removed = any(entry[0] == id for entry in removal.records)
        if was_queued and not was_removed:
            self._listeners.tell([id])
        return was_queued or was_removed

    def clear(self, partition: str | None = None) -> int:
        """Remove all entries, of one partition or of all, and return their number."""
        waiting = [
            item.meta.id for item in list(self._worker.queued.values()) if partition in (None, item.meta.partition)
        ]
        waiting = [id for id in waiting if self._worker.drop(id)]

        removal = Removal()
        query = "SELECT n FROM {} WHERE ?1 IS NULL OR partition = ?1"

        def of(sql: sqlite3.Connection, table_name: str) -> list[int]:
            return [n for (n,) in sql.execute(query.format(table_name), (partition,))]

        try:
            removal = self._remove(lambda sql: (of(sql, "records"), of(sql, "segments")))
        except (sqlite3.Error, StoreUnavailable) as error:
            logger.warning("the store cannot be cleared: %s", error)
        self._listeners.tell(waiting)
        return len({entry[0] for entry in removal.records} | set(waiting))

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Remove the selected entries and everything derived from them, to the last byte. Returns what was removed.

        dry_run  report without removing

        Other processes may use the store meanwhile, and notice the removal; state that they store later stays, as do rows of other prompts.
        Raises: StoreError if entries or traces remain.
        """
        # What waits in the queue is of this store too.
        self.flush()
        if self._objects.shared and not self.catch_up():
            raise StoreError(
                "entries could not be removed (the objects cannot be listed): see that the store answers, and purge again"
            )
        if self._stones is not None and selection.older_than is None and not dry_run:  # what is stored now is not older
            try:
                self._stones.write(selection, filter(None, map(self.meta, selection.donors)))
            except StoreUnavailable as error:
                raise StoreError(
                    f"entries could not be removed ({error}): see that the store answers, and purge again"
                ) from error
            self.catch_up()  # what came meanwhile

        purged = self._purge(selection, dry_run=dry_run)
        if self._feed is not None and not dry_run:
            self._feed.tell(LIST, [""])  # for the tombstone
        return purged

    def _purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        selected: list[ChunkMeta] = []
        parts: list[int] = []

        def choose(sql: sqlite3.Connection) -> tuple[list[int], list[int]]:
            query = "SELECT n, about FROM records WHERE ?1 IS NULL OR partition = ?1"
            rows = sql.execute(query, (selection.partition,)).fetchall()
            metas_by_number = {n: self._notes.decoded(n, about) for n, about in rows}
            numbers = {meta.id: n for n, meta in metas_by_number.items() if meta is not None}
            selected[:] = chosen(
                [meta for meta in metas_by_number.values() if meta is not None], selection, self._clock()
            )
            damaged = [n for n, meta in metas_by_number.items() if meta is None]
            records = [*damaged, *(numbers[meta.id] for meta in selected)]
            parts[:] = loose(sql, selection, [meta.id for meta in selected], records, self._clock())
            return records, parts

        remains = "entries"
        try:
            removal = self._remove(choose, dry_run=dry_run)
            if not dry_run:
                # The cache keeps decoded prompts, and would keep the purged ones in memory.
                decode_meta.cache_clear()
                self._discard()
                remains = "text of removed entries in catalog.sqlite-wal"
                # The write-ahead log still holds the removed rows' bytes.
                self._catalog.empty_log()
        except (sqlite3.Error, StoreUnavailable) as error:
            why = error.reason if isinstance(error, StoreUnavailable) else reason_of(error)
            remedy = {"full": "make room on its disk", "busy": "end the process that uses it"}.get(
                why, "make the store writable"
            )
            raise StoreError(f"{remains} could not be removed ({error}): {remedy} and purge again") from error
        return replace(counted(selected), parts=len(parts), bytes=removal.nbytes)

    def sweep(self) -> int:
        """Remove expired entries and their traces, and return their number."""
        removal = self._remove(lambda sql: changes.expired(sql, self._clock()))
        self._traces = self._traces or bool(removal.records or removal.objects)
        if self._traces:
            self._traces = False  # what leaves meanwhile comes with the next
            try:
                self._discard()
                self._catalog.empty_log()
            except (sqlite3.Error, StoreUnavailable) as error:
                self._traces = True
                logger.warning("traces of removed entries are deleted later: %s", error)

        return len(removal.records)

    def _put(self, stored_state: StoredState) -> None:
        # Eviction in this transaction must know the latest uses.
        uses = self._notes.take_uses()
        purges = self._stones.number if self._stones is not None else 0
        try:
            removal, evicted = write(
                self._objects, self._catalog, self._budget, stored_state, self._clock(), uses, purges
            )
        except BaseException:
            self._notes.put_back(uses)
            raise
        for partition, limit in evicted:
            self._counters.add("evictions", partition, limit)

        self._left(removal)
        if stored_state.stop == stored_state.meta.num_tokens:
            self._notes.found(stored_state.meta.id)
        if stored_state.meta.ttl and self._background:
            self._worker.wake()
        for stone in self._stones.since(purges) if self._stones is not None else ():
            self._purge(stone.selection)  # it came while this was being stored

    # How it is read

    def _found(self, id: str, *, rows: bool = True) -> tuple[ChunkMeta | None, list[SegmentSlice]]:
        """Description of a chunk, or of a prefix as far as it is known, and with `rows` its pieces. Raises: sqlite3.Error"""
        if id.startswith(PREFIX):
            return self._prefix(id)
        if id in self._notes.lost:
            return None, []

        self.notice()
        row = self._catalog.record(id, self._clock())
        meta = self._notes.decoded(row.n, row.about) if row is not None else None
        if row is None or meta is None:
            return None, []
        return meta, self._catalog.pieces(row.n) if rows else []  # by its number: what replaces it has another

    def _load(
        self, meta: ChunkMeta, slices: Sequence[SegmentSlice], rows: Rows | None, may_retry: bool, until: float | None
    ) -> list[StoredState] | None:
        """Raises: Late"""
        get, needed_slices, parts = self._objects.get, _with_rows(slices, rows), list[StoredState]()
        if self._far is not None:
            get = self._far.fetch(self._catalog.sizes(needed_slices), until)
        for segment_slice in needed_slices:
            tensor = self._tensor(segment_slice, may_retry, get)
            if tensor is None:
                return None
            # The whole state in one segment needs no range.
            if len(slices) == 1 and segment_slice.stop == segment_slice.end and not meta.id.startswith(PREFIX):
                parts.append(StoredState(meta, tensor))
                continue
            if segment_slice.stop < segment_slice.end:
                tensor = tensor.rows(0, segment_slice.stop - segment_slice.start)
            part = StoredState(meta, tensor, [(segment_slice.start, segment_slice.stop)])
            try:
                check_alike(part, parts[0].tensor if parts else tensor)
            except CorruptChunk as error:
                self._notes.damaged(segment_slice.n, str(error), meta.partition)
                return None
            parts.append(part)

        return parts

    def _tensor(self, segment_slice: SegmentSlice, may_retry: bool, get: Callable[[str], Bytes]) -> Tensor | None:
        """Load a segment's state. `may_retry`: a missing one may have been replaced, and is not given up yet."""
        try:
            data = get(segment_slice.name)
            verified = self._verified.get(segment_slice.name)
            # The same array: a file that has changed is mapped anew, and verified again.
            if verified is not None and verified[0] is data:
                return dequantized(verified[1])

            segment, tensor = opened(data, segment_slice.name)
            if (segment.start, segment.stop) != (segment_slice.start, segment_slice.end):
                raise CorruptChunk(f"object {segment_slice.name} has other rows")
            row = self._catalog.read("SELECT partition, epoch, keys, ids FROM segments WHERE n = ?", (segment_slice.n,))
            if row and row[0] != segment.row:
                raise CorruptChunk(f"object {segment_slice.name} is of another prompt than was told")
            self._verified[segment_slice.name] = (data, tensor)
            return dequantized(tensor)
        except ObjectMissing:
            if not may_retry:
                self._notes.missing(segment_slice.n)
        except CorruptChunk as error:
            self._notes.damaged(segment_slice.n, str(error))
        except StoreUnavailable as error:
            logger.warning("object %s cannot be read: %s", segment_slice.name, error)

        return None

    def _share_uses(self, remote_ids: Sequence[str]) -> Sequence[str]:
        """Note other machines' uses, and return the uses here."""
        for id in remote_ids:
            self.touch(id, announce=False)
        self._notes.settle(wait=False)
        return self._notes.take_untold()

    def _prefix(self, id: str) -> tuple[ChunkMeta | None, list[SegmentSlice]]:
        tokens, key = prefix_of(id) or (0, b"")
        slices = self._catalog.chain(tokens, key, self._clock())
        if not slices:
            return None, []
        segment_row = self._catalog.read("SELECT partition, epoch FROM segments WHERE n = ?", (slices[-1].n,))
        return (
            ChunkMeta(id, segment_row[0][0], segment_row[0][1], (0,) * tokens, "", "") if segment_row else None
        ), slices

    # How it leaves

    def _remove(self, choose: Choose, *, dry_run: bool = False) -> Removal:
        """See `removal.remove`."""
        removal = remove(self._objects, self._catalog, choose, dry_run=dry_run)
        if not dry_run:
            self._left(removal)
        return removal

    def _left(self, removal: Removal, *, during_read: bool = False) -> None:
        """Forget removed entries, delete their objects and tell the listeners. Call after the commit, without a lock.

        during_read  a read found it: no request waits for a service, and the worker deletes
        """
        with self._lock:
            for name in removal.objects:
                self._verified.pop(name, None)
        if removal.objects and during_read and self._far is not None and self._background and not self._closed:
            self._discard_later()
        elif removal.objects:
            try:
                self._discard()
            except (sqlite3.Error, StoreUnavailable) as error:
                if not self._traces:
                    logger.warning("files of removed entries are deleted later: %s", error)
                self._discard_later()

        self._listeners.tell(id for id, _ in removal.records)

    def _discard_later(self) -> None:
        self._traces = True
        if self._background:
            self._worker.wake()

    def _discard(self) -> None:
        """Delete the objects of all removed segments, of any process. Raises: sqlite3.Error, Unknown"""
        names = self._catalog.leaving()
        self._objects.delete(names)
        self._catalog.deleted(names)

    # The worker

    def _tick(self) -> float | None:
        if not self._background or self._closed:
            return None
        due = self._catalog.next_due()
        if due is None and not self._traces:
            return None

        wait = (due or 0.0) - self._clock()
        if wait <= 0 or self._traces:
            self.sweep()
            due = self._catalog.next_due()
            wait = max(1.0, due - self._clock()) if due is not None else 60.0
        return wait

    def _usable(self, id: str) -> QueuedState | None:
        item = self._worker.queued.get(id)
        return item if item is not None and not is_expired(item.meta, self._clock()) else None

    def _waiting(self, id: str) -> StoredState | None:
        """Return a queued chunk with its state."""
        item = self._usable(id)
        try:
            stored_state = item.chunk() if item is not None else None
        except Exception:  # the worker counts it
            return None
        if stored_state is not None:
            self._counters.add("hits", stored_state.meta.partition)
        return stored_state

    def _work(self, item: QueuedState) -> None:
        id = item.meta.id
        try:
            outcome = self._store(item)
            # Only after it is stored: until then readers find it in the queue.
            was_dropped = self._worker.leave(item)
            if outcome == "stored" and was_dropped:
                outcome = "dropped"
                self.delete(id)  # removed while it was being stored

            self._worker.count(outcome)
            if outcome == "stored" and item.after is not None:
                item.after(self.meta(id) or item.meta)
        except Exception:
            self._worker.leave(item)
            self._worker.count("errors")
            logger.exception("a chunk could not be made or stored")
        # Indexes learned of it when it was queued, and must forget it again.
        if self.meta(id) is None:
            self._listeners.tell([id])

    def _store(self, item: QueuedState) -> str:
        """Store a chunk and name the outcome."""
        if self._worker.queued.get(item.meta.id) is not item:
            return "dropped"

        meta = item.meta if item.complete is None else item.complete(item.meta)
        stored_state = None if meta is None else item.chunk()
        if meta is None or stored_state is None:
            return "empty"
        return (
            "stored"
            if self.put(StoredState(replace(meta, nbytes=stored_state.tensor.nbytes), stored_state.tensor))
            else "refused"
        )


def _with_rows(slices: Sequence[SegmentSlice], rows: Rows | None) -> list[SegmentSlice]:
    """Pieces with some of these rows; None: all."""
    if rows is None:
        return list(slices)
    return [
        segment_slice
        for segment_slice in slices
        if not segment_slice.stop or any(a < segment_slice.stop and segment_slice.start < b for a, b in rows)
    ]
