"""The registry behind all views: one table, one budget, one lock, and the one implementation of `get_or_compute`."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.errand import Errand, Wanted
from dejakv.encoder_cache.eviction import Key
from dejakv.encoder_cache.shelf import Shelf
from dejakv.encoder_cache.shelves import Shelves
from dejakv.encoder_cache.single_flight import Flight, check_not_leading, leading
from dejakv.encoder_cache.stats import Counters, EncoderCacheStats, summed
from dejakv.encoder_cache.tensors import check_embedding, owned, size_of
from dejakv.encoder_cache.tier import Tier
from dejakv.errors import InputError
from dejakv.retention import kept_for, nothing_is_kept
from dejakv.store.age import now as clock
from dejakv.store.expiry import shortest
from dejakv.store.selection import Purged, Selection


class Registry:
    """Thread-safe. Keys carry the partition, so that nothing is found, counted or cleared across partitions."""

    def __init__(self, shelf: Shelf | Shelves, tier: Tier | None, check_finite: bool, ttl: float = 0.0) -> None:
        self._shelf = shelf
        self.tier = tier
        self._check_finite = check_finite
        self._ttl = ttl
        self._lock = threading.Lock()
        self._flights: dict[Key, Flight] = {}
        self._counters: defaultdict[str, Counters] = defaultdict(Counters)

    def take(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, counted as a hit; None, without counting, if it is not in memory."""
        with self._lock:
            entry = self._shelf.get(key)
            if entry is None:
                return None
            self._shelf.touch(entry)
            self._counters[key[0]].served(entry.block)
            return entry.block

    def peek(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, without counting anything."""
        with self._lock:
            entry = self._shelf.get(key)
            return entry.block if entry is not None else None

    def await_output(self, wanted: Wanted, timeout_s: float, poll_s: float) -> VisualEmbeddingBlock | None:
        """The block as soon as this process or (through the tier) another one has it; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            block = self.take(wanted.key)
            if block is not None:
                return block
            if self.tier is not None and self.tier.load(wanted.key).block is not None:
                return self.recall(wanted)
            if time.monotonic() >= deadline:
                with self._lock:
                    self._counters[wanted.key[0]].misses += 1
                return None
            time.sleep(poll_s)

    def recall(self, wanted: Wanted) -> VisualEmbeddingBlock | None:
        """The block from the tier, if there is one, and from now on in memory; counted as a hit or a miss."""
        block = self._from_tier(wanted)
        with self._lock:
            counters = self._counters[wanted.key[0]]
            if block is None:
                counters.misses += 1
                return None
            self._put(wanted.key, block)
            counters.served(block)
            return block

    def store(self, wanted: Wanted, embedding: Any, seconds: float | None) -> VisualEmbeddingBlock | None:
        """Stores the embedding; None if it was refused. Raises InputError for anything that is not an embedding."""
        block = self._block(wanted, embedding, seconds)
        if nothing_is_kept():
            return None
        with self._lock:
            kept = self._put(wanted.key, block)
            if self.tier is not None:
                self.tier.save(wanted.key, block)
        return block if kept else None

    def begin(self, wanted: Wanted) -> tuple[VisualEmbeddingBlock | None, Flight | None, bool]:
        """The caller's next step: take the block, wait for the flight, or (True) lead it."""
        key = wanted.key
        with self._lock:
            entry = self._shelf.get(key)
            if entry is not None:
                self._shelf.touch(entry)
                self._counters[key[0]].served(entry.block)
                return entry.block, None, False
            flight = self._flights.get(key)
            if flight is None or flight.stranded:
                flight = self._flights[key] = Flight(key, discard=nothing_is_kept())
                return None, flight, True
            check_not_leading(flight)
            self._counters[key[0]].waiting += 1
            return None, flight, False

    @contextmanager
    def lead(self, errands: Sequence[Errand]) -> Generator[None, None, None]:
        """Afterwards the errands' flights are over in any case. The flights pass an encoder's error to all waiting
        callers and the leader; only interruptions and cancellations are raised here."""
        for errand in errands:
            errand.begun = True
        token = leading.set((*leading.get(), *(errand.flight for errand in errands)))
        try:
            yield
        except Exception as error:
            for errand in errands:
                self._fail(errand, error)
        except BaseException:
            for errand in errands:
                self.abandon(errand.flight)
            raise
        else:
            for errand in errands:
                try:
                    self._land(errand)
                except Exception as error:
                    self._fail(errand, error)
        finally:
            with suppress(ValueError):  # a coroutine that is collected unfinished ends outside its context
                leading.reset(token)

    def recall_all(self, errands: Iterable[Errand]) -> None:
        """Fetches the outputs that the tier has."""
        for errand in errands:
            errand.recalled = self._from_tier(errand.wanted)

    def abandon(self, flight: Flight) -> None:
        """Ends a flight without a result, so that another caller leads the next."""
        with self._lock:
            self._forget(flight)
        flight.abandon()

    @contextmanager
    def waiting(self, flight: Flight) -> Generator[Callable[[VisualEmbeddingBlock], None], None, None]:
        """Surrounds a follower's wait; call the yielded function with the output that arrived."""
        counters = self._counters[flight.key[0]]

        def arrived(block: VisualEmbeddingBlock) -> None:
            with self._lock:
                counters.served(block)
                counters.coalesced += 1
                if (entry := self._shelf.get(flight.key)) is not None:
                    self._shelf.touch(entry)

        try:
            yield arrived
        finally:
            with self._lock:
                counters.waiting -= 1

    def clear(self, partition: str | None) -> None:
        """Drops entries and figures; outputs of runs in progress are delivered but not kept."""
        with self._lock:
            for key in [entry.key for entry in self._shelf if partition in (None, entry.key[0])]:
                self._shelf.remove(key)
            for key in [key for key in self._flights if partition in (None, key[0])]:
                self._flights.pop(key).discard = True
            for name, counters in self._counters.items():
                if partition in (None, name):
                    counters.reset()
        if self.tier is not None:
            self.tier.clear(partition)

    def remove(self, key: Key) -> bool:
        """Drops one entry from memory; False if it is not there."""
        with self._lock:
            return self._shelf.remove(key) is not None

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """See `VisualKVCache.purge`; outputs of selected runs in progress are delivered but not kept."""
        with self._lock:
            gone = self._shelf.purge(selection, dry_run=dry_run)
            for key in list(self._flights):
                if not dry_run and selection.takes_output(key, clock(), clock()):
                    self._flights.pop(key).discard = True
        purged = self.tier.purge(selection, dry_run=dry_run) if self.tier is not None else Purged()
        alone = [size for id, size in gone.items() if id not in purged.ids]
        return purged + Purged(encoder_outputs=len(alone), bytes=sum(alone), ids=frozenset(gone))

    def stats(self, partition: str | None, dp_mode_recommendations: int) -> EncoderCacheStats:
        """The figures of one partition, or of all together."""
        with self._lock:
            parts = self._counters.values() if partition is None else [self._counters.get(partition, Counters())]
            held = self._shelf.tally(partition)
            return summed(
                parts,
                entries=held.entries,
                bytes=held.bytes,
                max_entries=self._shelf.max_entries,
                max_bytes=self._shelf.max_bytes,
                dp_mode_recommendations=dp_mode_recommendations,
            )

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _from_tier(self, wanted: Wanted) -> VisualEmbeddingBlock | None:
        if self.tier is None:
            return None
        recalled = self.tier.load(wanted.key)
        block = recalled.block
        if block is not None and wanted.place is not None:
            block.embedding = wanted.place(block.embedding)
        with self._lock:
            counters = self._counters[wanted.key[0]]
            counters.disk_hits += block is not None
            counters.disk_misses += block is None
            counters.disk_corrupt += recalled.corrupt
        return block

    def _land(self, errand: Errand) -> None:
        key, flight = errand.wanted.key, errand.flight
        block = errand.recalled or self._block(errand.wanted, errand.output, errand.seconds)
        with self._lock:
            counters = self._counters[key[0]]
            if errand.recalled is not None:
                counters.served(block)
            else:
                counters.misses += 1
                counters.encoder_runs += 1
                counters.encoder_seconds += errand.seconds
            if not flight.discard:
                self._put(key, block)
                if self.tier is not None and errand.recalled is None:
                    self.tier.save(key, block)
            self._forget(flight)
        flight.land(block)

    def _fail(self, errand: Errand, error: Exception) -> None:
        with self._lock:
            counters = self._counters[errand.wanted.key[0]]
            counters.misses += 1
            counters.encoder_failures += 1
            self._forget(errand.flight)
        errand.flight.fail(error)

    def _block(self, wanted: Wanted, embedding: Any, seconds: float | None) -> VisualEmbeddingBlock:
        check_embedding(embedding, finite=self._check_finite)
        embedding = owned(embedding)
        if seconds is not None and not seconds >= 0:
            raise InputError(
                f"encoder_seconds is {seconds}: pass the time of the encoder run, or None if it was not measured"
            )
        _, _, modality, content_hash = wanted.key
        return VisualEmbeddingBlock(
            content_hash=content_hash,
            modality=modality,
            resolution=wanted.resolution,
            embedding=embedding,
            encoder_model=wanted.encoder_model,
            created_at=time.monotonic(),
            estimated_vram_bytes=size_of(embedding),
            encoder_seconds=seconds,
            born=clock(),
            ttl=shortest(self._ttl, kept_for()),
        )

    def _put(self, key: Key, block: VisualEmbeddingBlock) -> bool:
        replaced = self._shelf.get(key) is not None
        placed = self._shelf.put(key, block)
        if placed.refused:
            self._counters[key[0]].refusals[placed.refused] += 1
            return False
        if replaced:
            self._counters[key[0]].evictions["replaced"] += 1
        for victim in placed.victims:
            self._counters[victim.key[0]].evictions[placed.reason] += 1
        return True
