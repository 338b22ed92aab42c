"""Outputs by key, in the store's memory tier and in a store on disk, with figures by partition and at most one encoder run for a key.

A run in progress is a future that threads wait for. It ends with the output, for all; with the encoder's error, for all, and the next
caller tries again; or, where the thread that encodes is interrupted, which is not the picture's fault, with nothing, and those who wait
start again.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from dejakv.encoder_cache.arrays import owned, size_of
from dejakv.encoder_cache.outputs import (
    Key,
    Resolution,
    VisualEmbeddingBlock,
    check_embedding,
    chunk_id,
    load,
    save,
)
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import InputError
from dejakv.request import kept_for, nothing_is_kept
from dejakv.store.budgets import NoRoom, PartitionBudgets, PolicyName, is_older, shortest
from dejakv.store.budgets import now as clock
from dejakv.store.memory import MemoryTier
from dejakv.store.selection import PurgeResult, Selection
from dejakv.store.store import Store

logger = logging.getLogger(__name__)


class _EncoderInterrupted(Exception):
    """The encoder's result is unknown: start again."""


class EncoderRun(Future[VisualEmbeddingBlock]):
    """An encoder run for one key.

    keep     whether its output may be kept: not if its request said so, or the cache was cleared meanwhile
    waiting  callers that wait for it
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key
        self.keep = not nothing_is_kept()
        self.waiting = 0


_leading: ContextVar[tuple[EncoderRun, ...]] = ContextVar("leading", default=())
"""Encoder runs under way in this context, to detect an encoder that asks for its own output."""


def _label(key: Key) -> str:
    """Name an output in the log: its modality and the beginning of its content's hash."""
    return f"{key[2]} {key[3][:16]}"


@dataclass(frozen=True)
class OutputRequest:
    """A wanted output, and its labels in case it must be computed."""

    key: Key
    resolution: Resolution | None = None
    encoder_model: str = ""


class QueueingController:
    """Allows every eviction. Subclass it to keep a minimum of entries."""

    def get_minimum_stable_blocks(self) -> int:
        """The fewest entries that evictions may leave. Called for each stored output, under the cache's lock."""
        return 0


class OutputRegistry:
    """Encoder outputs in memory and on disk, by key. Thread-safe. Keys hold the partition: nothing is found, counted or cleared across
    partitions.

    parts  of the budget in memory; None or undivided: shared
    disk   store of outputs that outlive the process, shared with other processes; None: memory alone
    """

    def __init__(
        self,
        parts: PartitionBudgets,
        policy: PolicyName,
        disk: Store | None,
        controller: QueueingController | None,
        *,
        check_finite: bool,
        ttl: float,
    ) -> None:
        self.disk = disk
        self.queueing_controller = controller
        self.policy: PolicyName = policy
        self._parts = parts
        self._check_finite = check_finite
        self._ttl = ttl
        self._lock = Lock()
        self._memory: dict[str, MemoryTier[Key, VisualEmbeddingBlock]] = {}
        self._runs: dict[Key, EncoderRun] = {}
        self._figures: defaultdict[str, EncoderCacheStats] = defaultdict(EncoderCacheStats)

    def take(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, counted as a hit; None, without counting, if it is not in memory."""
        with self._lock:
            return self._hit(key)

    def recall(self, request: OutputRequest) -> VisualEmbeddingBlock | None:
        """Load the block from disk into memory, counted as a hit; None, counted as a miss, without one."""
        block = self._from_disk(request)
        with self._lock:
            if block is None:
                self._missed(request.key)
            else:
                self._hold(request.key, block)
                self._served(request.key, block)
        return block

    def wait_until_there(self, request: OutputRequest, timeout_s: float, poll_s: float) -> VisualEmbeddingBlock | None:
        """The block as soon as this process or (through the disk) another one has it; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            block = self.take(request.key)
            if block is not None:
                return block
            # Without counting: polls would be misses.
            on_disk = self.disk is not None and load(self.disk, request.key)[0] is not None
            if on_disk or time.monotonic() >= deadline:
                return self.recall(request)
            time.sleep(poll_s)

    def keep(self, request: OutputRequest, embedding: Any, seconds: float | None) -> VisualEmbeddingBlock | None:
        """Stores the embedding; None if it was refused. Raises InputError for anything that is not an embedding."""
        block = self._block(request, embedding, seconds)
        if nothing_is_kept():
            return None
        with self._lock:
            return block if self._keep(request.key, block) else None

    def encoded(self, request: OutputRequest, compute: Callable[[], Any]) -> VisualEmbeddingBlock:
        """The block, computed on this thread if it is missing and nobody else computes it. Raises: the encoder's error; InputError if
        `compute` asks the cache for its own key."""
        while True:
            with self._lock:
                if (block := self._hit(request.key)) is not None:
                    return block
                run = self._runs.get(request.key)
                # The first caller leads, and all others wait for its run.
                if leads := run is None:
                    run = self._runs[request.key] = EncoderRun(request.key)
                elif run in _leading.get():
                    raise InputError(
                        "`compute` asked the cache for the very picture it was called for and would wait for itself: "
                        "call the encoder in it, not the cache"
                    )
                else:
                    run.waiting += 1
            # Outside of the lock: the encoder takes long.
            if leads:
                self._lead(run, request, compute)
                return run.result()

            try:
                block = run.result()
            except _EncoderInterrupted:
                continue
            finally:
                with self._lock:
                    run.waiting -= 1
            return self._arrived(run, block)

    def clear(self, partition: str | None = None) -> None:
        """Drops the entries and figures of one partition, or all, in memory and on disk. Outputs of runs in progress are delivered but
        not kept."""
        with self._lock:
            dropped = self._drop(lambda key, _: partition in (None, key[0]), clock())
            for name in list(self._figures) if partition is None else [partition]:
                self._figures.pop(name, None)
        if self.disk is not None:
            self.disk.flush()  # so that nothing is being written that leaves later
            self.disk.clear(partition)
        logger.info("encoder outputs cleared, %d of them in memory", len(dropped))

    def drop(self, key: Key) -> bool:
        """Drops one entry from memory; False if it is not there."""
        with self._lock:
            return self._held(key) is not None and self._in(key[0]).drop(key)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Drops selected entries for good, in memory and on disk; what was dropped, or with `dry_run` would be. An output in both
        counts once. Outputs of selected runs in progress are delivered but not kept.

        Raises: StoreError if the disk cannot be purged.
        """
        now = clock()

        with self._lock:
            dropped_bytes = self._drop(lambda key, born: selection.takes_output(key, born, now), now, dry_run=dry_run)

        # Outside of the lock: the disk may be slow.
        purged = self.disk.purge(selection, dry_run=dry_run) if self.disk is not None else PurgeResult()
        memory_only = [size for id, size in dropped_bytes.items() if id not in purged.ids]
        return purged + PurgeResult(
            encoder_outputs=len(memory_only), bytes=sum(memory_only), ids=frozenset(dropped_bytes)
        )

    def recommended(self, partition: str, is_recommended: bool) -> None:
        """Counts a recommendation of DP mode."""
        with self._lock:
            self._figures[partition].dp_mode_recommendations += is_recommended

    def stats(self, partition: str | None = None) -> EncoderCacheStats:
        """The figures of one partition, or of all together (for the operator, not for tenants)."""
        with self._lock:
            stats = EncoderCacheStats.total(
                figures for name, figures in self._figures.items() if partition in (None, name)
            )
            for key, block in self._blocks():
                if partition in (None, key[0]):
                    stats.entries += 1
                    stats.bytes += block.estimated_vram_bytes
            stats.waiting_callers = sum(run.waiting for key, run in self._runs.items() if partition in (None, key[0]))

        stats.max_entries, stats.max_bytes = self._parts.max_entries, self._parts.max_bytes
        return stats

    def _in(self, partition: str) -> MemoryTier[Key, VisualEmbeddingBlock]:
        """The memory that a partition's outputs are in."""
        name = partition if self._parts.divided else ""
        tier = self._memory.get(name)
        if tier is None:
            part = self._parts.of(partition)
            tier = self._memory[name] = MemoryTier(part.max_bytes, part.max_entries, self.policy)
        return tier

    def _blocks(self) -> Iterator[tuple[Key, VisualEmbeddingBlock]]:
        return (each for tier in self._memory.values() for each in tier)

    def _held(self, key: Key) -> VisualEmbeddingBlock | None:
        """The block in memory, without counting a use; None, also for an expired one, which leaves."""
        block = self._in(key[0]).get(key)
        if block is not None and block.ttl and is_older(block.born, block.ttl, clock()):
            self._in(key[0]).drop(key)
            return None
        return block

    def _use(self, key: Key) -> None:
        """Counts a use of what is in memory."""
        block = self._in(key[0]).use(key)
        if block is not None:
            block.access_count += 1

    def _hold(self, key: Key, block: VisualEmbeddingBlock) -> bool:
        """Takes a block into memory, in place of one of the same key; False if it was refused."""
        # Before `put`, which replaces it.
        old = self._held(key)
        try:
            controller = self.queueing_controller
            minimum = controller.get_minimum_stable_blocks() // self._parts.partitions if controller else 0
            limit, evicted_keys = self._in(key[0]).put(key, block, block.estimated_vram_bytes, minimum)
        except NoRoom as refusal:
            self._figures[key[0]].refusals[str(refusal)] += 1
            logger.debug("encoder output not stored (%s): %s", refusal, _label(key))
            return False

        if old is not None:
            block.access_count = old.access_count
            self._figures[key[0]].evictions["replaced"] += 1
        for evicted in evicted_keys:
            self._figures[evicted[0]].evictions[limit] += 1
            logger.debug("encoder output evicted (%s): %s", limit, _label(evicted))

        tier = self._in(key[0])
        logger.debug(
            "encoder output stored: %s, %d bytes; now %d outputs, %d bytes",
            *(_label(key), block.estimated_vram_bytes, len(tier), tier.nbytes),
        )
        return True

    def _drop(self, selects: Callable[[Key, float], bool], now: float, *, dry_run: bool = False) -> dict[str, int]:
        """Drops entries by their key and the time they were made; the bytes of each by id. Of runs in progress, which count as
        made now (`now`), the output is not kept."""
        chosen = [(key, block) for key, block in self._blocks() if selects(key, block.born)]
        if not dry_run:
            for key, _ in chosen:
                self._in(key[0]).drop(key)
            # A copy: the loop removes runs.
            for key in [key for key in self._runs if selects(key, now)]:
                self._runs.pop(key).keep = False
        return {chunk_id(key): block.estimated_vram_bytes for key, block in chosen}

    def _hit(self, key: Key) -> VisualEmbeddingBlock | None:
        block = self._held(key)
        if block is not None:
            self._use(key)
            self._served(key, block)
        return block

    def _served(self, key: Key, block: VisualEmbeddingBlock) -> None:
        """Counts an output delivered without running the encoder."""
        figures = self._figures[key[0]]
        figures.hits += 1
        figures.vram_saved_bytes += block.estimated_vram_bytes
        figures.encoder_seconds_saved += block.encoder_seconds or 0.0
        logger.debug("encoder output hit: %s, used %d times", _label(key), block.access_count)

    def _missed(self, key: Key) -> EncoderCacheStats:
        """Count a miss; returns the partition's figures."""
        figures = self._figures[key[0]]
        figures.misses += 1
        logger.debug("encoder output miss: %s", _label(key))
        return figures

    def _arrived(self, run: EncoderRun, block: VisualEmbeddingBlock) -> VisualEmbeddingBlock:
        """Counts an output that another caller's run delivered."""
        with self._lock:
            self._served(run.key, block)
            self._figures[run.key[0]].coalesced += 1
            self._use(run.key)
        return block

    def _lead(self, run: EncoderRun, request: OutputRequest, compute: Callable[[], Any]) -> None:
        """Takes the output from the disk, or else runs the encoder, and ends the run. It passes an encoder's error on; only an
        interruption of this thread is raised here."""
        token = _leading.set((*_leading.get(), run))
        try:
            block = self._from_disk(request)
            if block is not None:
                self._end(run, block, recalled=True)
                return

            began = time.perf_counter()
            output = compute()
            self._end(run, self._block(request, output, time.perf_counter() - began))
        except Exception as error:
            self._fail(run, error)
        finally:
            _leading.reset(token)
            # An interruption passes by the handler above.
            if not run.done():
                with self._lock:
                    self._forget(run)
                run.set_exception(_EncoderInterrupted())

    def _end(self, run: EncoderRun, block: VisualEmbeddingBlock, *, recalled: bool = False) -> None:
        with self._lock:
            if recalled:
                self._served(run.key, block)
            else:
                figures = self._missed(run.key)
                figures.encoder_runs += 1
                figures.encoder_seconds += block.encoder_seconds or 0.0
            if run.keep:
                self._keep(run.key, block, on_disk=not recalled)
            # Under the same lock as `_keep`: a caller finds the run or its block.
            self._forget(run)
        # Last: waiting callers go on as soon as it is set.
        run.set_result(block)

    def _fail(self, run: EncoderRun, error: Exception) -> None:
        with self._lock:
            self._missed(run.key).encoder_failures += 1
            self._forget(run)
        run.set_exception(error)

    def _forget(self, run: EncoderRun) -> None:
        # After a purge a new run of this key may have begun.
        if self._runs.get(run.key) is run:
            del self._runs[run.key]

    def _from_disk(self, request: OutputRequest) -> VisualEmbeddingBlock | None:
        if self.disk is None:
            return None
        block, corrupt = load(self.disk, request.key)
        with self._lock:
            figures = self._figures[request.key[0]]
            figures.disk_hits += block is not None
            figures.disk_misses += block is None
            figures.disk_corrupt += corrupt
        return block

    def _keep(self, key: Key, block: VisualEmbeddingBlock, *, on_disk: bool = True) -> bool:
        if on_disk and self.disk is not None:
            save(self.disk, key, block)
        return self._hold(key, block)

    def _block(self, request: OutputRequest, embedding: Any, seconds: float | None) -> VisualEmbeddingBlock:
        check_embedding(embedding, finite=self._check_finite)
        embedding = owned(embedding)
        if seconds is not None and not seconds >= 0:
            raise InputError(
                f"encoder_seconds is {seconds}: pass the time of the encoder run, or None if it was not measured"
            )

        _, _, modality, content_hash = request.key
        return VisualEmbeddingBlock(
            content_hash=content_hash,
            modality=modality,
            resolution=request.resolution,
            embedding=embedding,
            encoder_model=request.encoder_model,
            created_at=time.monotonic(),
            estimated_vram_bytes=size_of(embedding),
            encoder_seconds=seconds,
            born=clock(),
            ttl=shortest(self._ttl, kept_for()),
        )
