"""Encoder outputs by key, in memory and on disk, with at most one encoder run for a key.

A run in progress is a future that threads wait for. It ends in one of three ways: with the output,
for all; with the encoder's error, for all, and the next caller tries again; or, where the thread
that encodes is interrupted, with nothing, and those who wait start again, because an interruption
is not the picture's fault.
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
    load,
    save,
    stored_id,
)
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import InputError
from dejakv.request import current_retention
from dejakv.store.budgets import NoRoom, PartitionBudgets, PolicyName, is_older, shortest_lifetime
from dejakv.store.budgets import now as clock
from dejakv.store.memory import MemoryTier
from dejakv.store.selection import PurgeResult, Selection
from dejakv.store.store import Store

logger = logging.getLogger(__name__)


class _EncoderInterrupted(Exception):
    """Interruption of the thread that ran the encoder: the result is unknown, so start again."""


class EncoderRun(Future[VisualEmbeddingBlock]):
    """Future of an encoder run for one key.

    Attributes
    ----------
    key : Key
        Key of the output.
    keep : bool
        Whether the output may be kept: false if the request said so, or if the cache was cleared
        meanwhile.
    waiting : int
        Number of callers that wait for the run.
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key
        # Read on the caller's thread, whose context holds the request's choice.
        self.keep = not current_retention().no_store
        self.waiting = 0


_leading: ContextVar[tuple[EncoderRun, ...]] = ContextVar("leading", default=())
"""Encoder runs under way in this context, to detect an encoder that asks for its own output."""


def _label(key: Key) -> str:
    """Return an output's name in the log: its modality and the beginning of its content's hash."""
    return f"{key[2]} {key[3][:16]}"


@dataclass(frozen=True)
class OutputRequest:
    """Key of a wanted output, with the labels that it gets if it must be computed."""

    key: Key
    resolution: Resolution | None = None
    encoder_model: str = ""


class QueueingController:
    """Lower limit of evictions: none. Subclass it to keep a minimum of entries."""

    def get_minimum_stable_blocks(self) -> int:
        """Return the fewest entries that evictions may leave.

        The cache calls it for each stored output, under its lock.
        """
        return 0


class OutputRegistry:
    """Encoder outputs in memory and on disk, by key. Thread-safe.

    Keys hold the partition: nothing is found, counted or cleared across partitions.

    Parameters
    ----------
    parts : PartitionBudgets
        Budget in memory, divided among partitions or shared.
    policy : PolicyName
        Eviction order.
    disk : Store or None
        Store of outputs that outlive the process, shared with other processes.
    controller : QueueingController or None
        Lower limit of evictions.
    check_finite : bool
        Refuse outputs with NaN or infinity.
    ttl : float
        Seconds for which an output may be used, 0 without a limit.
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
        """Return the block if it is in memory, and count a hit; None, uncounted, if it is not."""
        with self._lock:
            return self._hit(key)

    def load_from_disk(self, request: OutputRequest) -> VisualEmbeddingBlock | None:
        """Load a block from disk into memory, and count a hit; without one, count a miss."""
        block = self._from_disk(request)
        with self._lock:
            if block is None:
                self._missed(request.key)
            else:
                self._put_in_memory(request.key, block)
                self._served(request.key, block)

        return block

    def wait_for_output(
        self, request: OutputRequest, timeout_s: float, poll_s: float
    ) -> VisualEmbeddingBlock | None:
        """Wait until this process, or another one through the disk, has the block.

        Parameters
        ----------
        request : OutputRequest
            The wanted output.
        timeout_s, poll_s : float
            Maximum time, and time between two looks, in seconds.

        Returns
        -------
        VisualEmbeddingBlock or None
            The block, None after the timeout. It counts once, as a hit or a miss.
        """
        # The wall clock may be set back or forth meanwhile.
        deadline = time.monotonic() + timeout_s
        while True:
            block = self.take(request.key)
            if block is not None:
                return block
            # Without counting: polls would be misses.
            on_disk = self.disk is not None and load(self.disk, request.key)[0] is not None
            if on_disk or time.monotonic() >= deadline:
                return self.load_from_disk(request)
            time.sleep(poll_s)

    def keep(
        self, request: OutputRequest, embedding: Any, seconds: float | None
    ) -> VisualEmbeddingBlock | None:
        """Store an embedding that the caller computed.

        Parameters
        ----------
        request : OutputRequest
            Its key and labels.
        embedding : array
            The encoder's output, numpy or torch.
        seconds : float or None
            Time of the computation, None if it was not measured.

        Returns
        -------
        VisualEmbeddingBlock or None
            The block; None if it was refused, or if the request forbids storing.

        Raises
        ------
        InputError
            For anything that is no embedding, and for a negative time.
        """
        block = self._block(request, embedding, seconds)
        if current_retention().no_store:
            return None
        with self._lock:
            return block if self._keep(request.key, block) else None

    def get_or_encode(
        self, request: OutputRequest, compute: Callable[[], Any]
    ) -> VisualEmbeddingBlock:
        """Return the block, computed on this thread if it is missing and nobody else computes it.

        Raises
        ------
        Exception
            The encoder's error.
        InputError
            If `compute` asks the cache for its own key, or returns no embedding.
        """
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
                        "`compute` asked the cache for the very picture it was called for and "
                        "would wait for itself: "
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

            return self._count_coalesced(run, block)

    def clear(self, partition: str | None = None) -> None:
        """Drop the entries and figures of one partition, or of all, in memory and on disk.

        Outputs of runs in progress are delivered but not kept.
        """
        with self._lock:
            dropped = self._drop(lambda key, _: partition in (None, key[0]), clock())
            for name in list(self._figures) if partition is None else [partition]:
                self._figures.pop(name, None)

        if self.disk is not None:
            # First, or an output that is being written now would stay.
            self.disk.flush()
            self.disk.clear(partition)

        logger.info("encoder outputs cleared, %d of them in memory", len(dropped))

    def drop(self, key: Key) -> bool:
        """Drop one entry from memory, and return whether it was there."""
        with self._lock:
            return self._peek(key) is not None and self._tier_of(key[0]).drop(key)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> PurgeResult:
        """Drop selected entries for good, in memory and on disk.

        Outputs of selected runs in progress are delivered but not kept.

        Parameters
        ----------
        selection : Selection
            The entries.
        dry_run : bool
            Only count what would be dropped.

        Returns
        -------
        PurgeResult
            What was dropped, or would be. An output in memory and on disk counts once.

        Raises
        ------
        StoreError
            If the disk cannot be purged.
        """
        now = clock()

        with self._lock:
            dropped_bytes = self._drop(
                lambda key, born: selection.covers_output(key, born, now), now, dry_run=dry_run
            )

        # Outside of the lock: the disk may be slow.
        purged = (
            self.disk.purge(selection, dry_run=dry_run) if self.disk is not None else PurgeResult()
        )
        # An output on disk has been counted by the store.
        memory_only = [size for id, size in dropped_bytes.items() if id not in purged.ids]
        return purged + PurgeResult(
            encoder_outputs=len(memory_only), bytes=sum(memory_only), ids=frozenset(dropped_bytes)
        )

    def recommended(self, partition: str, is_recommended: bool) -> None:
        """Count a recommendation of data-parallel encoding (DP mode); False counts nothing."""
        with self._lock:
            self._figures[partition].dp_mode_recommendations += is_recommended

    def stats(self, partition: str | None = None) -> EncoderCacheStats:
        """Return the figures of one partition, or (for the operator alone) of all together."""
        with self._lock:
            stats = EncoderCacheStats.total(
                figures for name, figures in self._figures.items() if partition in (None, name)
            )
            for key, block in self._blocks():
                if partition in (None, key[0]):
                    stats.entries += 1
                    stats.bytes += block.estimated_vram_bytes

            stats.waiting_callers = sum(
                run.waiting for key, run in self._runs.items() if partition in (None, key[0])
            )

        stats.max_entries, stats.max_bytes = self._parts.max_entries, self._parts.max_bytes
        return stats

    def _tier_of(self, partition: str) -> MemoryTier[Key, VisualEmbeddingBlock]:
        """Return the memory that a partition's outputs are in."""
        # Undivided budgets are one tier for all, so that its eviction order is common to all.
        name = partition if self._parts.divided else ""
        tier = self._memory.get(name)
        if tier is None:
            part = self._parts.for_partition(partition)
            tier = self._memory[name] = MemoryTier(part.max_bytes, part.max_entries, self.policy)
        return tier

    def _blocks(self) -> Iterator[tuple[Key, VisualEmbeddingBlock]]:
        return (each for tier in self._memory.values() for each in tier)

    def _peek(self, key: Key) -> VisualEmbeddingBlock | None:
        """Return the block in memory, without counting a use. An expired one is dropped: None."""
        block = self._tier_of(key[0]).get(key)
        if block is not None and block.ttl and is_older(block.born, block.ttl, clock()):
            self._tier_of(key[0]).drop(key)
            return None
        return block

    def _use(self, key: Key) -> None:
        """Count a use of an output in memory."""
        block = self._tier_of(key[0]).use(key)
        if block is not None:
            block.access_count += 1

    def _put_in_memory(self, key: Key, block: VisualEmbeddingBlock) -> bool:
        """Put a block into memory, in place of one of the same key; False if it was refused."""
        # Before `put`, which replaces it.
        old = self._peek(key)
        try:
            controller = self.queueing_controller
            minimum = (
                controller.get_minimum_stable_blocks() // self._parts.partitions
                if controller
                else 0
            )
            limit, evicted_keys = self._tier_of(key[0]).put(
                key, block, block.estimated_vram_bytes, minimum
            )
        except NoRoom as refusal:
            self._figures[key[0]].refusals[str(refusal)] += 1
            logger.debug("encoder output not stored (%s): %s", refusal, _label(key))
            return False

        if old is not None:
            # The count is of the key: a replaced block's uses go on.
            block.access_count = old.access_count
            self._figures[key[0]].evictions["replaced"] += 1
        for evicted in evicted_keys:
            self._figures[evicted[0]].evictions[limit] += 1
            logger.debug("encoder output evicted (%s): %s", limit, _label(evicted))

        tier = self._tier_of(key[0])
        logger.debug(
            "encoder output stored: %s, %d bytes; now %d outputs, %d bytes",
            *(_label(key), block.estimated_vram_bytes, len(tier), tier.nbytes),
        )
        return True

    def _drop(
        self, selects: Callable[[Key, float], bool], now: float, *, dry_run: bool = False
    ) -> dict[str, int]:
        """Drop entries selected by their key and birth, and return the bytes of each by id.

        Runs in progress count as made now (`now`); the outputs of selected ones are not kept.
        """
        chosen = [(key, block) for key, block in self._blocks() if selects(key, block.born)]
        if not dry_run:
            for key, _ in chosen:
                self._tier_of(key[0]).drop(key)
            # A copy: the loop removes runs.
            for key in [key for key in self._runs if selects(key, now)]:
                self._runs.pop(key).keep = False

        return {stored_id(key): block.estimated_vram_bytes for key, block in chosen}

    def _hit(self, key: Key) -> VisualEmbeddingBlock | None:
        block = self._peek(key)
        if block is not None:
            self._use(key)
            self._served(key, block)
        return block

    def _served(self, key: Key, block: VisualEmbeddingBlock) -> None:
        """Count an output that was delivered without running the encoder."""
        figures = self._figures[key[0]]
        figures.hits += 1
        figures.vram_saved_bytes += block.estimated_vram_bytes
        figures.encoder_seconds_saved += block.encoder_seconds or 0.0
        logger.debug("encoder output hit: %s, used %d times", _label(key), block.access_count)

    def _missed(self, key: Key) -> EncoderCacheStats:
        """Count a miss, and return the partition's figures."""
        figures = self._figures[key[0]]
        figures.misses += 1
        logger.debug("encoder output miss: %s", _label(key))
        return figures

    def _count_coalesced(
        self, run: EncoderRun, block: VisualEmbeddingBlock
    ) -> VisualEmbeddingBlock:
        """Count an output that another caller's run delivered."""
        with self._lock:
            self._served(run.key, block)
            self._figures[run.key[0]].coalesced += 1
            self._use(run.key)

        return block

    def _lead(self, run: EncoderRun, request: OutputRequest, compute: Callable[[], Any]) -> None:
        """Take the output from the disk, or else run the encoder, and end the run.

        The run carries an encoder's error. Only an interruption of this thread is raised here.
        """
        # An encoder may run another one for another key, so that several runs are open.
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
                # Only now is it a miss: until here the disk might have had it.
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
        return self._put_in_memory(key, block)

    def _block(
        self, request: OutputRequest, embedding: Any, seconds: float | None
    ) -> VisualEmbeddingBlock:
        check_embedding(embedding, finite=self._check_finite)
        embedding = owned(embedding)
        if seconds is not None and not seconds >= 0:
            raise InputError(
                f"encoder_seconds is {seconds}: pass the time of the encoder run, or None if it "
                "was not measured"
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
            ttl=shortest_lifetime(self._ttl, current_retention().ttl),
        )
