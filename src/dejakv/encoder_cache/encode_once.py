"""The registry behind all views: outputs in memory and on disk, figures by partition, and at most one encoder run for a key.

A run in progress is a `Flight`, a future that threads and asyncio tasks wait for. It lands, and all get the output; its encoder raises,
and all waiting callers get the error while the next caller tries again; or its leader is interrupted or cancelled, which is not the
picture's fault, and the waiting callers start again.
"""

import asyncio
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from dejakv.encoder_cache.disk import DiskTier
from dejakv.encoder_cache.outputs import Key, Outputs, Resolution, VisualEmbeddingBlock, chunk_id
from dejakv.encoder_cache.stats import Counters, EncoderCacheStats, summed
from dejakv.encoder_cache.tensors import check_embedding, owned, size_of
from dejakv.errors import InputError
from dejakv.request import kept_for, nothing_is_kept
from dejakv.store.age import now as clock
from dejakv.store.age import shortest
from dejakv.store.selection import Purged, Selection

Compute = Callable[[list[int]], Any]
"""Encodes the media of these indices; returns an embedding for each."""

_STRANDED_CHECK_S = 1.0


class _Abandoned(Exception):
    """The encoder's result is unknown: start again."""


class Flight:
    """An encoder run for one key. `discard`: its output must not be kept (its request asked for that, or the cache was cleared)."""

    def __init__(self, key: Key, *, discard: bool = False) -> None:
        self.key = key
        self.discard = discard
        self.future: Future[VisualEmbeddingBlock] = Future()
        self.future.set_running_or_notify_cancel()  # so that a cancelled task does not cancel it for others
        self.task: asyncio.Task[None] | None = None
        self._thread = threading.get_ident()

    @property
    def stranded(self) -> bool:
        """Whether it can never land, because the event loop of its encoder was closed."""
        return self.task is not None and self.task.get_loop().is_closed() and not self.future.done()

    def abandon(self) -> None:
        """Lets the waiting callers start again; does nothing if the flight is over."""
        if not self.future.done():
            self.future.set_exception(_Abandoned())

    def wait(self) -> VisualEmbeddingBlock:
        """Blocks until the flight is over; returns its output or raises its error."""
        if self.task is not None and self._thread == threading.get_ident() and not self.future.done():
            raise InputError(
                "this thread's event loop is running the encoder for this picture and would wait for itself: "
                "use `await view.aget_or_compute(...)` here"
            )
        while True:
            with suppress(WaitTimeout):
                return self.future.result(_STRANDED_CHECK_S)
            if self.stranded:
                raise _Abandoned


_leading: ContextVar[tuple[Flight, ...]] = ContextVar("leading", default=())
"""The flights whose encoder is running in this context, to detect an encoder that asks for its own output."""


@dataclass(frozen=True)
class Wanted:
    """A wanted output, and its labels in case it must be computed. `place`: see EncoderView."""

    key: Key
    resolution: Resolution | None = None
    encoder_model: str = ""
    place: Callable[[Any], Any] | None = None


@dataclass(eq=False)
class _Led:
    """One key of the caller's to lead for: `recalled` from disk, or else `output` of the encoder, which took `seconds`."""

    index: int
    wanted: Wanted
    flight: Flight
    recalled: VisualEmbeddingBlock | None = None
    output: Any = None
    seconds: float = 0.0
    begun: bool = False


class Registry:
    """Thread-safe. Keys carry the partition, so that nothing is found, counted or cleared across partitions.

    outputs_of  makes the memory of a partition, or of all: `shared`
    """

    def __init__(
        self,
        outputs_of: Callable[[str], Outputs],
        disk: DiskTier | None,
        *,
        shared: bool,
        max_entries: int,
        max_bytes: int,
        check_finite: bool,
        ttl: float,
    ) -> None:
        self.disk = disk
        self._outputs_of = outputs_of
        self._shared = shared
        self._budget = {"max_entries": max_entries, "max_bytes": max_bytes}
        self._check_finite = check_finite
        self._ttl = ttl
        self._lock = threading.Lock()
        self._memory: dict[str, Outputs] = {}
        self._flights: dict[Key, Flight] = {}
        self._counters: defaultdict[str, Counters] = defaultdict(Counters)
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._recommended = 0

    def take(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, counted as a hit; None, without counting, if it is not in memory."""
        with self._lock:
            return self._hit(key)

    def peek(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, without counting anything."""
        with self._lock:
            entry = self._in(key[0]).get(key)
            return entry.block if entry is not None else None

    def recall(self, wanted: Wanted) -> VisualEmbeddingBlock | None:
        """The block from disk, if it is there, and from now on in memory; counted as a hit or a miss."""
        block = self._from_disk(wanted)
        with self._lock:
            counters = self._counters[wanted.key[0]]
            if block is None:
                counters.misses += 1
                return None
            self._put(wanted.key, block)
            counters.served(block)
            return block

    def wait_for(self, wanted: Wanted, timeout_s: float, poll_s: float) -> VisualEmbeddingBlock | None:
        """The block as soon as this process or (through the disk) another one has it; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            block = self.take(wanted.key)
            if block is not None:
                return block
            if self.disk is not None and self.disk.load(wanted.key)[0] is not None:
                return self.recall(wanted)
            if time.monotonic() >= deadline:
                with self._lock:
                    self._counters[wanted.key[0]].misses += 1
                return None
            time.sleep(poll_s)

    def store(self, wanted: Wanted, embedding: Any, seconds: float | None) -> VisualEmbeddingBlock | None:
        """Stores the embedding; None if it was refused. Raises InputError for anything that is not an embedding."""
        block = self._block(wanted, embedding, seconds)
        if nothing_is_kept():
            return None
        with self._lock:
            kept = self._put(wanted.key, block)
            if self.disk is not None:
                self.disk.save(wanted.key, block)
        return block if kept else None

    def get(self, wanted: Sequence[Wanted], compute: Compute) -> list[VisualEmbeddingBlock]:
        """The blocks, computed on this thread where they are missing and nobody else computes them.

        It leads all its own runs before it waits for any other, so two callers with common keys never wait for each other.
        """
        found: dict[int, VisualEmbeddingBlock] = {}
        while len(found) < len(wanted):
            with self._joined(wanted, found) as (led, followed):
                if led:
                    self._lead(led, compute)
                for one in led:
                    with suppress(_Abandoned):
                        found[one.index] = one.flight.wait()
                for index, flight in followed:
                    with suppress(_Abandoned):
                        found[index] = self._arrived(flight, flight.wait())
        return [found[index] for index in range(len(wanted))]

    async def aget(self, wanted: Wanted, compute: Callable[[], Any]) -> VisualEmbeddingBlock:
        """The same for a task and one key; the encoder runs out of reach of any caller's cancellation."""
        found: dict[int, VisualEmbeddingBlock] = {}
        while not found:
            with self._joined([wanted], found) as (led, followed):
                for one in led:
                    self._start(one, compute)
                    with suppress(_Abandoned):
                        found[0] = await asyncio.wrap_future(one.flight.future)
                for _, flight in followed:
                    with suppress(_Abandoned):
                        found[0] = self._arrived(flight, await asyncio.wrap_future(flight.future))
        return found[0]

    def clear(self, partition: str | None) -> None:
        """Drops entries and figures; outputs of runs in progress are delivered but not kept."""
        with self._lock:
            for outputs in self._memory.values():
                for entry in [entry for entry in outputs if partition in (None, entry.key[0])]:
                    outputs.drop(entry)
            for key in [key for key in self._flights if partition in (None, key[0])]:
                self._flights.pop(key).discard = True
            for name in list(self._counters) if partition is None else [partition]:
                self._counters.pop(name, None)
            self._recommended *= partition is not None
        if self.disk is not None:
            self.disk.clear(partition)

    def remove(self, key: Key) -> bool:
        """Drops one entry from memory; False if it is not there."""
        with self._lock:
            outputs = self._in(key[0])
            entry = outputs.get(key)
            if entry is not None:
                outputs.drop(entry)
            return entry is not None

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """See `VisualKVCache.purge`; outputs of selected runs in progress are delivered but not kept."""
        at, gone = clock(), dict[str, int]()
        with self._lock:
            for outputs in self._memory.values():
                for entry in [e for e in outputs if selection.takes_output(e.key, e.block.born, at)]:
                    gone[chunk_id(entry.key)] = entry.block.estimated_vram_bytes
                    if not dry_run:
                        outputs.drop(entry)
            for key in list(self._flights):
                if not dry_run and selection.takes_output(key, at, at):
                    self._flights.pop(key).discard = True
        purged = self.disk.purge(selection, dry_run=dry_run) if self.disk is not None else Purged()
        alone = [size for id, size in gone.items() if id not in purged.ids]
        return purged + Purged(encoder_outputs=len(alone), bytes=sum(alone), ids=frozenset(gone))

    def recommended(self, yes: bool) -> None:
        """Counts a recommendation of DP mode."""
        with self._lock:
            self._recommended += yes

    def stats(self, partition: str | None) -> EncoderCacheStats:
        """The figures of one partition, or of all together."""
        with self._lock:
            blocks = [e.block for o in self._memory.values() for e in o if partition in (None, e.key[0])]
            parts = self._counters.values() if partition is None else [self._counters.get(partition, Counters())]
            waiting = sum(self._waiting.values()) if partition is None else self._waiting[partition]
            return summed(
                parts,
                waiting_callers=waiting,
                entries=len(blocks),
                bytes=sum(block.estimated_vram_bytes for block in blocks),
                dp_mode_recommendations=self._recommended if partition is None else 0,
                **self._budget,
            )

    def _in(self, partition: str) -> Outputs:
        """The memory that a partition's outputs are in."""
        part = "" if self._shared else partition
        if part not in self._memory:
            self._memory[part] = self._outputs_of(partition)
        return self._memory[part]

    def _hit(self, key: Key) -> VisualEmbeddingBlock | None:
        outputs = self._in(key[0])
        entry = outputs.get(key)
        if entry is None:
            return None
        outputs.touch(entry)
        self._counters[key[0]].served(entry.block)
        return entry.block

    @contextmanager
    def _joined(
        self, wanted: Sequence[Wanted], found: dict[int, VisualEmbeddingBlock]
    ) -> Generator[tuple[list[_Led], list[tuple[int, Flight]]]]:
        """The caller's next steps for what is not found yet: runs to lead, and runs of others to wait for."""
        led: list[_Led] = []
        followed: list[tuple[int, Flight]] = []
        try:
            for index in (index for index in range(len(wanted)) if index not in found):
                key = wanted[index].key
                with self._lock:
                    block, flight = self._hit(key), self._flights.get(key)
                    if block is not None:
                        found[index] = block
                    elif flight is None or flight.stranded:
                        flight = self._flights[key] = Flight(key, discard=nothing_is_kept())
                        led.append(_Led(index, wanted[index], flight))
                    elif flight in _leading.get():
                        raise InputError(
                            "`compute` asked the cache for the very picture it was called for and would wait for itself: "
                            "call the encoder in it, not the cache"
                        )
                    else:
                        self._waiting[key[0]] += 1
                        followed.append((index, flight))
            yield led, followed
        finally:
            with self._lock:
                for _, flight in followed:
                    self._waiting[flight.key[0]] -= 1
            for one in led:
                if not one.begun:
                    self._abandon(one.flight)

    def _arrived(self, flight: Flight, block: VisualEmbeddingBlock) -> VisualEmbeddingBlock:
        """Counts an output that another caller's run delivered."""
        with self._lock:
            counters, outputs = self._counters[flight.key[0]], self._in(flight.key[0])
            counters.served(block)
            counters.coalesced += 1
            if (entry := outputs.get(flight.key)) is not None:
                outputs.touch(entry)
        return block

    def _lead(self, led: Sequence[_Led], compute: Compute) -> None:
        """Runs the encoder once for all that the disk does not have; its time is shared evenly among them."""
        with self._landing(led):
            self._recall_all(led)
            missing = [one for one in led if one.recalled is None]
            if not missing:
                return
            began = time.perf_counter()
            outputs = _not_awaitable(compute([one.index for one in missing]))
            seconds = (time.perf_counter() - began) / len(missing)
            if len(outputs) != len(missing):
                raise InputError(
                    f"`compute` was asked for {len(missing)} embeddings and returned {len(outputs)}: "
                    "return one for each index, in their order"
                )
            for one, output in zip(missing, outputs, strict=True):
                one.output, one.seconds = output, seconds

    def _start(self, one: _Led, compute: Callable[[], Any]) -> None:
        """Begins a run on this event loop, or in a thread if `compute` is not asynchronous."""
        loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(compute) or inspect.iscoroutinefunction(type(compute).__call__):
            one.flight.task = loop.create_task(self._alead(one, compute))
            one.flight.task.add_done_callback(
                lambda _: self._abandon(one.flight)
            )  # if it was cancelled before it began
        else:
            context = copy_context()
            loop.run_in_executor(None, lambda: context.run(self._lead, [one], alone(compute)))
        one.begun = True

    async def _alead(self, one: _Led, compute: Callable[[], Any]) -> None:
        with self._landing([one]):
            if self.disk is not None:
                await asyncio.to_thread(self._recall_all, [one])
            if one.recalled is None:
                began = time.perf_counter()
                one.output = await compute()
                one.seconds = time.perf_counter() - began

    @contextmanager
    def _landing(self, led: Sequence[_Led]) -> Generator[None]:
        """Afterwards the flights are over in any case. They pass an encoder's error to all waiting callers and the leader; only
        interruptions and cancellations are raised here."""
        for one in led:
            one.begun = True
        token = _leading.set((*_leading.get(), *(one.flight for one in led)))
        try:
            yield
        except Exception as error:
            for one in led:
                self._fail(one, error)
        except BaseException:
            for one in led:
                self._abandon(one.flight)
            raise
        else:
            for one in led:
                try:
                    self._land(one)
                except Exception as error:
                    self._fail(one, error)
        finally:
            with suppress(ValueError):  # a coroutine that is collected unfinished ends outside its context
                _leading.reset(token)

    def _land(self, one: _Led) -> None:
        key, flight = one.wanted.key, one.flight
        block = one.recalled or self._block(one.wanted, one.output, one.seconds)
        with self._lock:
            counters = self._counters[key[0]]
            if one.recalled is not None:
                counters.served(block)
            else:
                counters.misses += 1
                counters.encoder_runs += 1
                counters.encoder_seconds += one.seconds
            if not flight.discard:
                self._put(key, block)
                if self.disk is not None and one.recalled is None:
                    self.disk.save(key, block)
            self._forget(flight)
        flight.future.set_result(block)

    def _fail(self, one: _Led, error: Exception) -> None:
        with self._lock:
            counters = self._counters[one.wanted.key[0]]
            counters.misses += 1
            counters.encoder_failures += 1
            self._forget(one.flight)
        one.flight.future.set_exception(error)

    def _abandon(self, flight: Flight) -> None:
        with self._lock:
            self._forget(flight)
        flight.abandon()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _recall_all(self, led: Iterable[_Led]) -> None:
        for one in led:
            one.recalled = self._from_disk(one.wanted)

    def _from_disk(self, wanted: Wanted) -> VisualEmbeddingBlock | None:
        if self.disk is None:
            return None
        block, corrupt = self.disk.load(wanted.key)
        if block is not None and wanted.place is not None:
            block.embedding = wanted.place(block.embedding)
        with self._lock:
            counters = self._counters[wanted.key[0]]
            counters.disk_hits += block is not None
            counters.disk_misses += block is None
            counters.disk_corrupt += corrupt
        return block

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
        outputs = self._in(key[0])
        replaced = outputs.get(key) is not None
        placed = outputs.put(key, block)
        if placed.refused:
            self._counters[key[0]].refusals[placed.refused] += 1
            return False
        if replaced:
            self._counters[key[0]].evictions["replaced"] += 1
        for victim in placed.victims:
            self._counters[victim.key[0]].evictions[placed.reason] += 1
        return True


def alone(compute: Callable[[], Any]) -> Compute:
    """`compute` for one key in the form for several."""
    return lambda _: [_not_awaitable(compute())]


def _not_awaitable(output: Any) -> Any:
    if inspect.iscoroutine(output):
        output.close()
        raise InputError("`compute` is asynchronous: pass an `async def` to `await aget_or_compute(...)`")
    return output
