"""The store: segments of computed state, a catalog to find them, and one writer thread.

    store.put(state); store.find(partition, epoch, token_ids)
    store.get(id); store.purge(Selection(partition="p"))

Exact state is cut into segments of at most 256 tokens and stored without those of a stored prefix.
A prefix is found by the names of its blocks, whoever stored it.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from cachetools import FIFOCache

from dejakv import errors
from dejakv.errors import InputError, StoreError
from dejakv.identity import BLOCK_TOKENS, common_prefix
from dejakv.store.background import (
    After,
    BackgroundWorker,
    Capture,
    Complete,
    QueuedState,
)
from dejakv.store.base import (
    KV,
    OUTAGES,
    SNAPSHOT,
    CorruptState,
    PrefixHit,
    RawTensor,
    Rows,
    StateInfo,
    StoredState,
    StoreStats,
    check_alike,
    joined,
)
from dejakv.store.budgets import Admission, AdmissionGate, Budget, Clock, is_expired
from dejakv.store.budgets import now as steady
from dejakv.store.catalog import Catalog, SegmentSlice, reason_of
from dejakv.store.changes import PendingNotes, Removal
from dejakv.store.counters import FAILED_WRITES, EntryListeners, StoreCounters, logger
from dejakv.store.forks import fork_safe_lock
from dejakv.store.objects import (
    Bytes,
    MemoryObjects,
    ObjectMissing,
    Objects,
    ReadTimeout,
    StoreUnavailable,
)
from dejakv.store.prefix_keys import PREFIX, SNAPSHOT_NAME, PrefixKeys, parse_prefix_id, prefix_id
from dejakv.store.reconcile import News, reconcile
from dejakv.store.remote.feed import LIST, ChangeFeed
from dejakv.store.remote.replicas import ReplicaFollower
from dejakv.store.remote.tiers import TieredObjects
from dejakv.store.removal import EntryRemoval
from dejakv.store.segment import open_object, state_view
from dejakv.store.selection import PurgeResult, Selection
from dejakv.store.writing import WriteRefused, write

_VERIFIED = 4096
"""Segments whose verification is remembered."""


_FORMER_NAMES: dict[str, tuple[str, Callable[["Store"], object]]] = {
    "outcomes": ("Store.stats().submissions", lambda store: store.stats(content=False).submissions),
    "outage_seconds": ("Store.stats(content=False)", lambda store: partial(_outages, store)),
    "on_evict": ("Store.listen(removed=...)", lambda store: partial(_on_evict, store)),
    "on_arrival": ("Store.listen(arrived=...)", lambda store: partial(_on_arrival, store)),
}
"""By former name of a member: what took its place, and how to get the former member's value."""


class Store:
    """Thread-safe store of computed state. Open it with `open_store`.

    Any number of processes may share a folder and its budgets.

    Reading never raises and never waits for a writer: missing, expired and damaged entries are None
    and counted. A failed write (full, busy, read-only) returns False and is counted by reason. A
    segment is verified whenever its bytes are read anew; mapped files and bytes kept in memory are
    verified once. Uses are noted in batches: a killed process loses the last ones.

    Parameters
    ----------
    objects : Objects | None
        Where segments are put; None: in the memory of this process.
    catalog : Catalog | None
        Index over the segments; None: in memory.
    budget : Budget | None
        Limits beyond which entries are evicted; None: no limits.
    admission : Admission | None
        What is worth storing; None: everything.
    clock : Clock
        Seconds since 1970.
    background : bool
        False: expired entries, which no read returns, are removed only by `sweep`, and other
        machines' changes are seen only by `catch_up`.
    queue : int
        Most waiting submissions: few, because each keeps its state in memory.
    feed : ChangeFeed | None
        Tells what other machines put into and took out of shared objects.
    release : Callable[[], None]
        Called at the end of `close`.
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
        self._remote = (
            self._objects
            if isinstance(self._objects, TieredObjects) and self._objects.shared
            else None
        )
        self._tombstones = self._remote.tombstones if self._remote is not None else None
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
        # Weakly, so that maps and copies that the objects gave up are given back.
        self._verified: FIFOCache[str, tuple[ReferenceType[Bytes], Callable[[Bytes], RawTensor]]]
        self._verified = FIFOCache(_VERIFIED)
        self._removal = EntryRemoval(
            self._objects,
            self._catalog,
            clock,
            self._forget_verified,
            self._listeners,
            wake=self._worker.wake if background else None,
            remote=self._remote is not None,
        )
        on_removal = partial(self._removal.finish, during_read=True)
        self._notes = PendingNotes(
            self._catalog, self._counters, on_removal, self._lock, self._objects.shared
        )
        self._closed = self._warned = False

        self._feed = feed
        self._follower: ReplicaFollower | None = None
        # Before the first lookup: the catalog may be older than the objects.
        self.catch_up()
        if self._objects.shared and background:
            self._follower = ReplicaFollower(self.catch_up, self._share_uses, feed)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in _FORMER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            new_name, get = _FORMER_NAMES[name]
            errors.warn_of_former_name(f"Store.{name}", new_name)
            return get(self)

    # Writing

    def admits(self, id: str, tokens: int, partition: str) -> bool:
        """Return whether to capture this prompt's state.

        Ask before capturing: the call counts as a sight of the prompt, and False as a refusal.

        Parameters
        ----------
        id : str
            Id of the prompt.
        tokens : int
            Tokens of the prompt.
        partition : str
            Partition for which a refusal is counted.

        Returns
        -------
        bool
            False if the prompt is refused; `stats().refused` counts the reason.
        """
        with self._lock:
            reason = self._gate.refusal_reason(id, tokens)
        if reason is not None:
            self._counters.add("refused", partition, reason)
        return reason is None

    def put(self, stored_state: StoredState) -> bool:
        """Store a state; of exact state only the part behind a stored prefix.

        A part of a prompt (`StoredState.rows`) is found as a prefix, and after the last part also
        by the prompt's id.

        Parameters
        ----------
        stored_state : StoredState
            The state with its description.

        Returns
        -------
        bool
            False if it is refused or fails; `stats().refused` counts the reason.
        """
        meta = stored_state.meta
        with self._lock:
            reason = "error" if self._closed else None
            # Later parts of a prompt are not asked again: its first one was admitted.
            begins = not stored_state.first and meta.kind != SNAPSHOT
            reason = reason or (
                self._gate.refusal_reason(meta.id, meta.num_tokens) if begins else None
            )

            reason = reason or self._gate.rate_refusal(stored_state.tensor.nbytes, refuse=begins)

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
                logger.warning("an entry cannot be stored: %s", str(error))
                reason = "invalid"

        if reason is None:
            self._counters.add("puts", meta.partition)
            return True

        self._counters.add("refused", meta.partition, reason)
        if reason in FAILED_WRITES and not self._warned:
            self._warned = True
            logger.warning(
                "state is not stored (%s): see that there is space and that you may write; "
                "further failures are only counted",
                FAILED_WRITES[reason],
            )

        return False

    def submit(
        self,
        meta: StateInfo,
        capture: Capture,
        *,
        complete: Complete | None = None,
        after: After | None = None,
        at_once: bool = False,
        background: bool = True,
    ) -> bool:
        """Queue a state for storage, so that it can be found and read at once.

        It waits for no other submission. Errors of callbacks and of the store are counted; only
        `at_once` passes on those of `capture`.

        Parameters
        ----------
        meta : StateInfo
            Description of the state.
        capture : Capture
            Copies the state, None if there is none. It is called once, by the worker or an earlier
            reader.
        complete : Complete | None
            Called before storage. Returns the finished description, None to cancel.
        after : After | None
            Called with the description after storage.
        at_once : bool
            Call `capture` before returning, as is needed if the state may change afterwards.
        background : bool
            False: store before returning.

        Returns
        -------
        bool
            False for a stored or unwanted prompt (`admits`), or if the queue is full or the store
            closed (`stats().submissions.dropped`).
        """
        # Of a named tensor the latest counts; a prompt's state is always the same.
        if meta.token_ids and (
            self.meta(meta.id) is not None
            or not self.admits(meta.id, meta.num_tokens, meta.partition)
        ):
            return False

        state = capture() if at_once else None
        item = QueuedState(meta, (lambda: state) if at_once else capture, complete, after)
        return self._worker.submit(item, background)

    def flush(self) -> None:
        """Wait until earlier submissions are stored or refused, and uses are noted."""
        self._worker.flush()
        self._notes.settle(wait=True)

    def close(self) -> None:
        """Store what is queued, and close; later submissions are dropped."""
        if self._closed:
            return
        # Before `_closed` is set: what waits is still to be stored.
        self._worker.close()
        if self._follower is not None:
            self._follower.close()

        self._closed = self._removal.closed = True
        self._notes.settle(wait=True)
        self._catalog.close()
        self._verified.clear()
        self._objects.close()
        # Last: until here nobody else may delete or repair the store.
        self._release()

    # Reading

    def get(self, id: str, until: float | None = None) -> StoredState | None:
        """Return an entry with all of its state; None if it is missing.

        Parameters
        ----------
        id : str
            Id of the entry, or of a prefix from `find`.
        until : float | None
            See `get_parts`.

        Returns
        -------
        StoredState | None
            All rows in one tensor. Several stored parts are joined in a read-only copy.
        """
        parts = self.get_parts(id, None, until)
        if not parts:
            return None
        meta = parts[0].meta
        if len(parts) == 1:
            return StoredState(meta, parts[0].tensor)
        tensor = joined(parts, 0, meta.num_tokens)
        return None if tensor is None else StoredState(meta, tensor)

    def get_parts(
        self, id: str, rows: Rows | None = None, until: float | None = None
    ) -> Sequence[StoredState] | None:
        """Return the parts of an entry that hold these rows, and count a use.

        Parameters
        ----------
        id : str
            Id of the entry, or of a prefix from `find`.
        rows : Rows | None
            Rows of the prompt; None: all.
        until : float | None
            When to give up a read from a bucket, by `time.monotonic`; None: as the service's client
            does.

        Returns
        -------
        Sequence[StoredState] | None
            Views of the parts as stored, in order. None if one is missing, damaged or late.
        """
        # Queued state is exact already, and in memory.
        waiting = self._queued_state(id)
        if waiting is not None:
            return (waiting,)
        meta = None
        try:
            # Evicted between lookup and read: the second lookup sees what is there now.
            for may_retry in (True, False):
                meta, slices = self._look_up(id)
                if meta is None:
                    break
                parts = self._load(meta, slices, rows, may_retry, until) if slices else None
                if parts is not None:
                    self._notes.note_use(id, [segment_slice.n for segment_slice in slices])
                    self._counters.add("hits", meta.partition)
                    return parts

            if meta is not None:
                # Twice without its objects: hidden until its damage is removed.
                self._notes.note_lost(
                    id, [segment_slice.n for segment_slice in self._look_up(id)[1]]
                )
        except ReadTimeout:
            # The read goes on, for the next caller: the entry is not lost.
            self._counters.add("late", meta.partition if meta is not None else None)
        except sqlite3.Error as error:
            meta = None
            logger.warning("the catalog cannot be read: %s", error)

        self._counters.add("misses", meta.partition if meta is not None else None)
        return None

    def remote_read_seconds(self, id: str, rows: Rows | None = None) -> float:
        """Estimate the seconds to read an entry, or rows of it, from a bucket.

        The estimate comes from the latest reads. It is 0 if all is on this machine.

        Parameters
        ----------
        id : str
            Id of the entry, or of a prefix from `find`.
        rows : Rows | None
            Rows of the prompt; None: all.

        Returns
        -------
        float
            Estimated seconds. 0 also if the catalog cannot be read.
        """
        if self._remote is None or self._queued_item(id) is not None:
            return 0.0
        try:
            return self._remote.read_seconds(
                self._catalog.sizes(_overlapping(self._look_up(id)[1], rows))
            )
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return 0.0

    def find(
        self,
        partition: str,
        epoch: str,
        token_ids: Sequence[int],
        spans: Sequence[Any] = (),
        *,
        whole: bool = False,
    ) -> tuple[PrefixHit, StateInfo] | None:
        """Find the longest stored prefix of a prompt, without noting a use.

        Parameters
        ----------
        partition, epoch : str
            Whose prompt it is, and fingerprint of the model.
        token_ids : Sequence[int]
            Tokens of the prompt.
        spans : Sequence[MediumSpan]
            Media of the prompt.
        whole : bool
            Whether the prefix may be the whole prompt. By default the last token is left, which
            the model computes to begin its answer.

        Returns
        -------
        tuple[PrefixHit, StateInfo] | None
            The prefix, of at least a block, with the description of its prompt, or of the prefix
            alone if that prompt has left. None without one.
        """
        max_tokens = len(token_ids) - (not whole)
        best: tuple[PrefixHit, StateInfo] | None = None
        # The newest first: of two with the same length it counts.
        for queued_state in reversed(list(self._worker.queued.values())):
            meta = queued_state.meta
            key = (meta.kind, meta.partition, meta.epoch)
            if key == (KV, partition, epoch) and self._queued_item(meta.id):
                tokens = min(
                    common_prefix(token_ids, meta.token_ids, spans, meta.spans), max_tokens
                )
                if tokens >= BLOCK_TOKENS and (best is None or tokens > best[0].tokens):
                    best = PrefixHit(meta.id, tokens), meta

        try:
            self._notice_removals()

            keys = PrefixKeys(partition, epoch, token_ids, spans)
            slices = self._catalog.longest_prefix(keys, max_tokens, self._clock())
        except (sqlite3.Error, InputError) as error:
            logger.warning("the catalog cannot be read: %s", error)
            return best

        tokens = slices[-1].stop if slices else 0
        if tokens < BLOCK_TOKENS or (best is not None and best[0].tokens >= tokens):
            return best

        meta = self.meta(slices[-1].entry_id)
        if meta is None or meta.kind != KV:
            # What has a name: a chain is read by its names alone.
            slices = self._catalog.longest_prefix(
                keys, max_tokens, self._clock(), partial_block=False
            )
            tokens = slices[-1].stop if slices else 0
            if tokens < BLOCK_TOKENS:
                return best
            ids = tuple(token_ids[:tokens])
            media = tuple(span for span in spans if span.start < tokens)
            id = prefix_id(tokens, keys.prefix_key(tokens))
            meta = StateInfo(id, partition, epoch, ids, "", "", spans=media)

        return PrefixHit(meta.id, tokens), meta

    def meta(self, id: str) -> StateInfo | None:
        """Describe an entry, or a prefix as far as it is known; None if it is missing.

        Parameters
        ----------
        id : str
            Id of the entry, or of a prefix from `find`.

        Returns
        -------
        StateInfo | None
            The description. That of a prefix has zeros for `token_ids`. None also if the catalog
            cannot be read.
        """
        item = self._queued_item(id)
        if item is not None:
            return item.meta
        try:
            return self._look_up(id, rows=False)[0]
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return None

    def snapshots(self, partition: str, epoch: str) -> frozenset[str]:
        """Return the ids of all stored and queued snapshots of a model's fixed state.

        Parameters
        ----------
        partition, epoch : str
            Whose prompts, and fingerprint of the model.

        Returns
        -------
        frozenset[str]
            Ids as of `prefix_keys.snapshot_id`. Of stored ones none if the catalog cannot be read.
        """
        queued = {
            item.meta.id
            for item in list(self._worker.queued.values())
            if (item.meta.kind, item.meta.partition, item.meta.epoch)
            == (SNAPSHOT, partition, epoch)
        }
        try:
            stored = self._catalog.ids_beginning(SNAPSHOT_NAME, partition, epoch)
            return stored | queued
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)
            return frozenset(queued)

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[StateInfo]:
        """Yield the descriptions of all entries, queued ones first.

        Parameters
        ----------
        partition : str | None
            Partition of the entries; None: all.
        epoch : str | None
            Fingerprint of the model; None: all.

        Yields
        ------
        StateInfo
            Description of an entry.
        """
        # An item may be stored while this runs, and would come twice.
        seen: set[str] = set()
        for item in list(self._worker.queued.values()):
            meta = item.meta
            if (
                partition in (None, meta.partition)
                and epoch in (None, meta.epoch)
                and self._queued_item(meta.id)
            ):
                seen.add(meta.id)
                yield meta

        try:
            for row in self._catalog.entries(partition, epoch, self._clock()):
                meta = (
                    None
                    if row.id in seen or row.id in self._notes.lost
                    else self._notes.decode(row.n, row.about)
                )
                if meta is not None:
                    yield meta
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

    def metas_since(self, mark: Any = None) -> tuple[list[StateInfo], Any]:
        """Describe at least the entries stored by any process since `mark`.

        Parameters
        ----------
        mark : Any
            A mark of an earlier call; None: describe all.

        Returns
        -------
        tuple[list[StateInfo], Any]
            The descriptions, and the mark for the next call.
        """
        token, last = mark or ("", 0)
        # Another token: the catalog was rebuilt, and its numbers begin anew.
        last = last if token == self._catalog.token else 0
        metas: list[StateInfo] = []
        try:
            for row in self._catalog.entries(None, None, self._clock(), after=last):
                last = row.n
                meta = self._notes.decode(row.n, row.about)
                if meta is not None:
                    metas.append(meta)
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

        return metas, (self._catalog.token, last)

    def catch_up(self, news: News | None = None) -> bool:
        """Make the catalog agree with the objects, and meet the budget of all partitions together.

        From then on, entries that other machines put are found, and what they purged has left. The
        background thread of a store in a bucket does this again and again.

        Parameters
        ----------
        news : News | None
            What the feed told; None: list the objects.

        Returns
        -------
        bool
            False if the objects cannot be listed, or a purge of another machine cannot be repeated.

        Raises
        ------
        sqlite3.Error
            If the catalog cannot be written.
        """
        try:
            buried = None if self._tombstones is None else self._tombstones.covered_names
            # Purges first: what they take must not be indexed for a moment.
            for stone in (
                self._tombstones.read_new() if self._tombstones is not None and news is None else ()
            ):
                self._removal.purge(stone.selection, self._notes.decode)
            changed = reconcile(
                self._objects, self._catalog, self._budget, self._clock(), news, buried
            )
            due = self._catalog.next_due()
        except (StoreError, StoreUnavailable) as error:
            logger.warning("the store is not compared with its objects: %s", error)
            return False

        for partition, limit in changed.evicted:
            self._counters.add("evictions", partition, limit)
        self._removal.finish(changed.removal)
        if changed.damaged:
            logger.warning("%d damaged objects are removed", changed.damaged)
        if changed.untrue:
            logger.warning(
                "%d headers in the feed are not their objects': the bucket was read instead",
                changed.untrue,
            )

        for _ in range(changed.damaged + changed.untrue):
            self._counters.add("corrupt")

        self._arrivals.notify(changed.arrived)
        if due is not None and self._background:
            self._worker.wake()
        return True

    def touch(self, id: str, *, announce: bool = True) -> None:
        """Count a use of an entry, for the order of eviction, without reading it.

        Parameters
        ----------
        id : str
            Id of the entry.
        announce : bool
            Whether to tell other machines: False for a use of theirs.
        """
        try:
            self._notes.note_use(
                id, [segment_slice.n for segment_slice in self._look_up(id)[1]], announce=announce
            )
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

    def stats(self, partition: str | None = None, *, content: bool = True) -> StoreStats:
        """Return counters, present content and outages, of one partition or of all.

        Parameters
        ----------
        partition : str | None
            Partition whose counters and content are returned; None: all.
        content : bool
            False: leave the content at 0, without a look into the catalog.

        Returns
        -------
        StoreStats
            Outages are those of the whole store. Submissions are counted for all partitions alone:
            of one they are 0. Content is 0 if the catalog cannot be read.
        """
        entries = total_bytes = 0
        try:
            if content:
                entries, total_bytes = self._catalog.totals(partition)
        except sqlite3.Error as error:
            logger.warning("the catalog cannot be read: %s", error)

        breakers = (source and source.breaker for source in (self._remote, self._feed))
        outages = {
            name: breaker.away_seconds
            for name, breaker in zip(OUTAGES, breakers, strict=True)
            if breaker is not None
        }
        figures = replace(self._counters.stats(partition, entries, total_bytes), **outages)
        # What another tenant submits must not show in a partition's figures.
        if partition is not None:
            return figures
        return replace(figures, submissions=self._worker.outcomes)

    def listen(
        self,
        *,
        removed: Callable[[str], None] | None = None,
        arrived: Callable[[str], None] | None = None,
    ) -> None:
        """Call functions with the id of each entry that leaves or comes.

        Parameters
        ----------
        removed : Callable[[str], None] | None
            Called after an entry left the store, by any process (evicted, deleted, expired or
            corrupt), and after a queued one was not stored.
        arrived : Callable[[str], None] | None
            Called after an entry of another machine was indexed, from the thread that ran
            `catch_up`.
        """
        if removed is not None:
            self._listeners.append(removed)
        if arrived is not None:
            self._arrivals.append(arrived)

    def _notice_removals(self) -> None:
        """Tell the listeners of entries that other processes removed.

        Raises
        ------
        sqlite3.Error
            If the catalog cannot be read.
        """
        news, complete = self._catalog.removed_elsewhere()
        if news or not complete:
            # So that no map keeps the bytes of entries that others removed.
            self._verified.clear()
            self._listeners.notify(id for id, back in news if not back)

    # Removing

    def delete(self, id: str) -> bool:
        """Remove an entry with the rows that no other prompt has; of a prefix, its last segment.

        Parameters
        ----------
        id : str
            Id of the entry, or of a prefix from `find`.

        Returns
        -------
        bool
            False if it is missing, or if the removal failed.
        """
        prefix = parse_prefix_id(id)
        if prefix is not None:
            try:
                slices = self._catalog.chain(*prefix, self._clock())
            except sqlite3.Error as error:
                logger.warning("prefix %s cannot be deleted: %s", id, error)
                return False
            for segment_slice in slices[-1:]:
                self._notes.note_damage(segment_slice.n, "it is not wanted")
            return bool(slices)

        # First the queue, then the catalog: in between the worker could store it.
        was_queued = self._worker.drop(id)
        try:
            removal = self._removal.delete(id)
        except (sqlite3.Error, StoreUnavailable, UnicodeError) as error:
            logger.warning("entry %s cannot be deleted: %s", id, error)
            return was_queued

        was_removed = any(entry[0] == id for entry in removal.entries)
        if was_queued and not was_removed:
            self._listeners.notify([id])
        return was_queued or was_removed

    def clear(self, partition: str | None = None) -> int:
        """Remove all entries, of one partition or of all, and return their number.

        Parameters
        ----------
        partition : str | None
            Partition to empty; None: all.

        Returns
        -------
        int
            Number of removed entries, queued ones included.
        """
        waiting = [
            item.meta.id
            for item in list(self._worker.queued.values())
            if partition in (None, item.meta.partition)
        ]

        # An item that was stored meanwhile is not queued any more, and counts as an entry.
        waiting = [id for id in waiting if self._worker.drop(id)]

        removal = Removal()
        try:
            removal = self._removal.clear(partition)
        except (sqlite3.Error, StoreUnavailable) as error:
            logger.warning("the store cannot be cleared: %s", error)

        self._listeners.notify(waiting)
        return len({entry[0] for entry in removal.entries} | set(waiting))

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Remove the selected entries and everything derived from them, to the last byte.

        Other processes may use the store meanwhile, and notice the removal. State that they store
        later stays, as do rows of other prompts.

        Parameters
        ----------
        selection : Selection
            What to remove.
        dry_run : bool
            Report without removing.

        Returns
        -------
        PurgeResult
            What was removed, or would be.

        Raises
        ------
        StoreError
            If entries or traces remain.
        """
        # What waits in the queue is of this store too.
        self.flush()
        if self._objects.shared and not self.catch_up():
            raise StoreError(
                "entries could not be removed (the objects cannot be listed): see that the store "
                "answers, and purge again"
            )

        # A purge by age needs no tombstone: what is being stored now is not older.
        if self._tombstones is not None and selection.older_than is None and not dry_run:
            try:
                self._tombstones.write(selection, filter(None, map(self.meta, selection.donors)))
            except StoreUnavailable as error:
                raise StoreError(
                    f"entries could not be removed ({error}): see that the store answers, and "
                    "purge again"
                ) from error

            # What came before the tombstone, and is taken too.
            self.catch_up()

        purged = self._removal.purge(selection, self._notes.decode, dry_run=dry_run)
        # Only a listing shows the tombstone to the others.
        if self._feed is not None and not dry_run:
            self._feed.publish(LIST, [""])
        return purged

    def sweep(self) -> int:
        """Remove expired entries and their traces, and return their number.

        Returns
        -------
        int
            Number of removed entries.

        Raises
        ------
        sqlite3.Error, StoreUnavailable
            If they cannot be removed.
        """
        return self._removal.sweep()

    def _put(self, stored_state: StoredState) -> None:
        # Eviction in this transaction must know the latest uses.
        uses = self._notes.drain_uses()
        purges = self._tombstones.number if self._tombstones is not None else 0
        try:
            removal, evicted = write(
                self._objects,
                self._catalog,
                self._budget,
                stored_state,
                self._clock(),
                uses,
                purges,
            )
        except BaseException:
            self._notes.restore_uses(uses)
            raise

        for partition, limit in evicted:
            self._counters.add("evictions", partition, limit)

        self._removal.finish(removal)
        if stored_state.stop == stored_state.meta.num_tokens:
            self._notes.note_stored(stored_state.meta.id)
        if stored_state.meta.ttl and self._background:
            self._worker.wake()
        # Purges that came while this was being stored take it too.
        for stone in self._tombstones.since(purges) if self._tombstones is not None else ():
            self._removal.purge(stone.selection, self._notes.decode)

    # How it is read

    def _look_up(
        self, id: str, *, rows: bool = True
    ) -> tuple[StateInfo | None, list[SegmentSlice]]:
        """Look up an entry, or a prefix as far as it is known.

        Parameters
        ----------
        id : str
            Id of the entry or prefix.
        rows : bool
            Whether to look up its slices.

        Raises
        ------
        sqlite3.Error
            If the catalog cannot be read.
        """
        if id.startswith(PREFIX):
            return self._look_up_prefix(id)
        if id in self._notes.lost:
            return None, []

        self._notice_removals()
        row = self._catalog.entry(id, self._clock())
        meta = self._notes.decode(row.n, row.about) if row is not None else None
        if row is None or meta is None:
            return None, []
        # By its number: an entry that replaces it has another one.
        return meta, self._catalog.slices(row.n) if rows else []

    def _load(
        self,
        meta: StateInfo,
        slices: Sequence[SegmentSlice],
        rows: Rows | None,
        may_retry: bool,
        until: float | None,
    ) -> list[StoredState] | None:
        """Read the slices with these rows; None if one is missing or damaged.

        Raises
        ------
        ReadTimeout
            If `until` has passed.
        """
        get, needed_slices = self._objects.get, _overlapping(slices, rows)
        parts: list[StoredState] = []
        # All at once from a bucket: one after another would pay the round trip each time.
        if self._remote is not None:
            get = self._remote.fetch(self._catalog.sizes(needed_slices), until)
        for segment_slice in needed_slices:
            tensor = self._tensor(meta.id, segment_slice, may_retry, get)
            if tensor is None:
                return None
            # The whole state in one segment needs no range.
            if (
                len(slices) == 1
                and segment_slice.stop == segment_slice.end
                and not meta.id.startswith(PREFIX)
            ):
                parts.append(StoredState(meta, tensor))
                continue

            if segment_slice.stop < segment_slice.end:
                tensor = tensor.rows(0, segment_slice.stop - segment_slice.start)
            part = StoredState(meta, tensor, [(segment_slice.start, segment_slice.stop)])
            try:
                check_alike(part, parts[0].tensor if parts else tensor)
            except CorruptState as error:
                self._notes.note_damage(segment_slice.n, str(error), meta.partition)
                return None

            parts.append(part)

        return parts

    def _tensor(
        self, id: str, segment_slice: SegmentSlice, may_retry: bool, get: Callable[[str], Bytes]
    ) -> RawTensor | None:
        """Load a segment's state; None if it is missing or damaged.

        Parameters
        ----------
        id : str
            Id of the entry that is read.
        segment_slice : SegmentSlice
            Rows of the segment.
        may_retry : bool
            Whether a missing segment may have been replaced, and is not given up yet.
        get : Callable[[str], Bytes]
            Reads an object by name.
        """
        try:
            data = get(segment_slice.name)
            verified = self._verified.get(segment_slice.name)
            # The same array: a file that has changed is mapped anew, and verified again.
            if verified is not None and verified[0]() is data:
                return verified[1](data)

            segment, tensor = open_object(data, segment_slice.name)
            if (segment.start, segment.stop) != (segment_slice.start, segment_slice.end):
                raise CorruptState(f"object {segment_slice.name} has other rows")
            # An object's own header says whose it is: the catalog may come from a feed that lies.
            row = self._catalog.read(
                "SELECT partition, epoch, keys, ids FROM segments WHERE n = ?", (segment_slice.n,)
            )
            # Of other kinds than rows it has neither keys nor tokens.
            foreign = segment.kind != KV and segment.entry_id != id
            if foreign or (row and row[0] != segment.row):
                raise CorruptState(
                    f"object {segment_slice.name} is of another prompt than was told"
                )
            view = partial(state_view, dtype=tensor.dtype, shape=tensor.shape, page=tensor.page)
            self._verified[segment_slice.name] = (ref(data), view)
            return tensor
        except ObjectMissing:
            if not may_retry:
                self._notes.note_missing(segment_slice.n)
        except CorruptState as error:
            self._notes.note_damage(segment_slice.n, str(error))
        except StoreUnavailable as error:
            logger.warning("object %s cannot be read: %s", segment_slice.name, error)

        return None

    def _forget_verified(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._verified.pop(name, None)

    def _share_uses(self, remote_ids: Sequence[str]) -> Sequence[str]:
        """Note other machines' uses, and return the uses here."""
        for id in remote_ids:
            self.touch(id, announce=False)
        self._notes.settle(wait=False)
        return self._notes.drain_unannounced()

    def _look_up_prefix(self, id: str) -> tuple[StateInfo | None, list[SegmentSlice]]:
        tokens, key = parse_prefix_id(id) or (0, b"")
        slices = self._catalog.chain(tokens, key, self._clock())
        if not slices:
            return None, []
        segment_row = self._catalog.read(
            "SELECT partition, epoch FROM segments WHERE n = ?", (slices[-1].n,)
        )
        return (
            StateInfo(id, segment_row[0][0], segment_row[0][1], (0,) * tokens, "", "")
            if segment_row
            else None
        ), slices

    # The worker

    def _tick(self) -> float | None:
        if not self._background or self._closed:
            return None
        due = self._catalog.next_due()
        if due is None and not self._removal.traces:
            return None

        wait = (due or 0.0) - self._clock()
        if wait <= 0 or self._removal.traces:
            self.sweep()
            due = self._catalog.next_due()
            wait = max(1.0, due - self._clock()) if due is not None else 60.0

        return wait

    def _queued_item(self, id: str) -> QueuedState | None:
        item = self._worker.queued.get(id)
        return item if item is not None and not is_expired(item.meta, self._clock()) else None

    def _queued_state(self, id: str) -> StoredState | None:
        """Return a queued entry with its state; None without one."""
        item = self._queued_item(id)
        try:
            stored_state = item.capture_once() if item is not None else None
        # The worker counts the error.
        except Exception:
            return None

        if stored_state is not None:
            self._counters.add("hits", stored_state.meta.partition)
        return stored_state

    def _work(self, item: QueuedState) -> None:
        id = item.meta.id
        try:
            outcome = self._store(item)
            # Only after it is stored: until then readers find it in the queue.
            was_dropped = self._worker.dequeue(item)
            # Removed while it was being stored.
            if outcome == "stored" and was_dropped:
                outcome = "dropped"
                self.delete(id)

            self._worker.count(outcome)
            if outcome == "stored" and item.after is not None:
                item.after(self.meta(id) or item.meta)
        except Exception:
            self._worker.dequeue(item)
            self._worker.count("errors")
            logger.exception("an entry could not be made or stored")

        # Indexes learned of it when it was queued, and must forget it again.
        if self.meta(id) is None:
            self._listeners.notify([id])

    def _store(self, item: QueuedState) -> str:
        """Store a queued state, and name the outcome."""
        if self._worker.queued.get(item.meta.id) is not item:
            return "dropped"

        meta = item.meta if item.complete is None else item.complete(item.meta)
        stored_state = None if meta is None else item.capture_once()
        if meta is None or stored_state is None:
            return "empty"
        meta = replace(meta, nbytes=stored_state.tensor.nbytes)
        return "stored" if self.put(StoredState(meta, stored_state.tensor)) else "refused"


def _on_evict(store: Store, listener: Callable[[str], None]) -> None:
    store.listen(removed=listener)


def _on_arrival(store: Store, listener: Callable[[str], None]) -> None:
    store.listen(arrived=listener)


def _outages(store: Store) -> dict[str, float]:
    stats = store.stats(content=False)
    return {name: getattr(stats, name) for name in OUTAGES}


def _overlapping(slices: Sequence[SegmentSlice], rows: Rows | None) -> list[SegmentSlice]:
    """List the slices with some of these rows; None: all slices."""
    if rows is None:
        return list(slices)

    # A slice without rows (a named tensor) belongs to every range.
    return [
        segment_slice
        for segment_slice in slices
        if not segment_slice.stop
        or any(a < segment_slice.stop and segment_slice.start < b for a, b in rows)
    ]
