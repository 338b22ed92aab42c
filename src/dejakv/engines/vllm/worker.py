"""Worker side of the connector: copies KV out of vLLM's blocks and into them.

Only threads touch the disk. The engine loop pays for copies between host memory and the KV cache
and for the check of the weights. For a blend it also pays for the recomputed rows (`loads`).
"""

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch

from dejakv.engines.tensors import to_store
from dejakv.engines.vllm.blend.blend import BlendRunner, BlendWorker
from dejakv.engines.vllm.device import CudaCopies, DeviceCopies, LentRange
from dejakv.engines.vllm.generations import CHANGED, RESET, WeightComparison, WeightsWatch
from dejakv.engines.vllm.messages import (
    LoadResult,
    SaveOrder,
    SnapshotOrder,
    StepPlan,
    StepReport,
    TimedStep,
)
from dejakv.engines.vllm.pages import BufferPool, LentBuffer, PagedKV
from dejakv.engines.vllm.transfers.loads import LoadRunner
from dejakv.errors import StoreError, is_out_of_memory
from dejakv.store.base import KV, StoredState
from dejakv.store.selection import DONORS
from dejakv.store.store import Store

log = logging.getLogger("dejakv.vllm")

REFUSED = "refused: the store did not take it"
UNWANTED = "admission: the store does not want it"
WINDOWS = "windows: vLLM has dropped blocks that are outside of them"
NO_MEMORY = "out of memory: the copy of the state could not be made"
"""Why a save is dropped."""

StateMaker = Callable[[], AbstractContextManager[StoredState]]
"""Context that gives the state to store; its memory may be used for something else at its end."""


class SaveWorker:
    """Stores copies of KV one after the other, in a thread.

    The scheduler side limits the number of pending copies (`saves`).
    """

    def __init__(self, store: Store, copies: DeviceCopies) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "dejakv-save", copies.enter_thread)
        self._under_way: dict[str, Future[str]] = {}
        self._dropped: list[tuple[str, str]] = []

    def drop(self, name: str, why: str) -> None:
        """Report a save that was not copied."""
        self._dropped.append((name, why))

    def submit(
        self, name: str, make_states: Sequence[StateMaker], check: WeightComparison | None = None
    ) -> None:
        """Store the states, or rows of them, that these functions give in the thread.

        None is stored if the check of the weights that is under way finds a change, and none
        behind one that is not stored.
        """
        self._under_way[name] = self._pool.submit(self._put, make_states, check)

    def take(self) -> list[tuple[str, str]]:
        """Return the saves that ended since the last call, each with the reason if not stored."""
        over = [(name, put.result()) for name, put in self._under_way.items() if put.done()]
        for name, _ in over:
            del self._under_way[name]
        dropped, self._dropped = self._dropped, []
        return [*over, *dropped]

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; return False after `timeout` seconds."""
        return not wait(list(self._under_way.values()), timeout).not_done

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for pending saves, and log how many were not stored.

        Saves that have not begun by then are cancelled.
        """
        pending = sum(not put.done() for put in self._under_way.values())
        if pending:
            log.warning(
                "stopping: %d parts of prompts are still to be stored, for at most %g s",
                pending,
                timeout,
            )

        if not self.flush(timeout):
            unstored = sum(not put.done() for put in self._under_way.values())
            log.warning(
                "stopped: %d of these %d parts of prompts were not stored within %g s",
                unstored,
                pending,
                timeout,
            )

        self._pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, make_states: Sequence[StateMaker], check: WeightComparison | None) -> str:
        """Store the states and return "", or the reason why one is not stored."""
        # Whatever is wrong with a store, it costs this save and nothing else.
        try:
            for make_state in make_states:
                # A GPU may still be copying the state until it is given here.
                with make_state() as stored_state:
                    if check is not None and check.differs():
                        return CHANGED
                    if not self._store.put(stored_state):
                        return REFUSED
            return ""
        except Exception as error:
            why = f"error: {type(error).__name__}: {error}"
            log.warning("the state of a prompt was not stored: %s", why)
            return why


KEEP_BYTES = 128 << 20
"""Bytes of unused host memory that is kept for the next copies."""


@dataclass
class WorkerSide:
    """Worker side of the connector, one instance in each worker.

    Attributes
    ----------
    blend_runner : BlendRunner or None
        None if blends are not possible.
    load_timeout_s : float
        Seconds after which a load that is still being read fails.
    max_pending_bytes : int
        Maximum bytes of state that blends start from.
    pinned_bytes : int
        Bytes of pinned host memory to reserve on a GPU.
    """

    store: Store
    paged: PagedKV
    blend_runner: BlendRunner | None
    weights_watch: WeightsWatch
    load_timeout_s: float
    max_pending_bytes: int
    pinned_bytes: int
    _loaded: list[LoadResult] = field(default_factory=list[LoadResult])
    _timed: TimedStep | None = None

    def __post_init__(self) -> None:
        self.paged.copies.reserve(self.pinned_bytes)
        self.saver, self.buffers = SaveWorker(self.store, self.paged.copies), BufferPool(KEEP_BYTES)
        blend_worker = None if self.blend_runner is None else BlendWorker(self.blend_runner)

        self.loads = LoadRunner(
            self.store,
            self.load_timeout_s,
            self.buffers,
            self.max_pending_bytes,
            self.paged,
            blend_worker,
            self.weights_watch,
        )

    def start_loads(self, plan: StepPlan) -> None:
        """Check the weights, then read the stored states of this step's loads, in threads."""
        using = bool(plan.saves or plan.loads or len(self.loads))
        # State of the generation before must not get into blocks of this one.
        if self.weights_watch.step(plan.weights_generation, computing=plan.computing, using=using):
            self.loads.give_up(RESET)

        self.loads.order(plan.loads)

    def copy_saves(self, plan: StepPlan) -> None:
        """Copy the state of this step's saves; a thread of `SaveWorker` stores the copies."""
        for save in plan.saves:
            if save.weights_generation == plan.weights_generation:
                self._copy(save)
            else:
                # Computed by weights of another generation than those that were just checked.
                self.saver.drop(save.name, RESET)

    def finish(self, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
        """Put arrived states into their blocks.

        Returns
        -------
        released, finished, failed : set[str]
            Ids of requests whose blocks are released, whose loads ended, and those of the latter
            whose load failed.
        """
        # What an earlier step began to check is known by now.
        self.weights_watch.passed(self.weights_watch.begun)
        loaded = self.loads.finish(plan, self.weights_watch.problem)
        self._loaded += loaded
        self._timed = plan.timed

        failed = {load_result.request_id for load_result in loaded if load_result.problem}
        return set(plan.releases), {load_result.request_id for load_result in loaded}, failed

    def report(self) -> StepReport | None:
        """Return the news since the last report, or None without any."""
        saved = self.saver.take()
        loaded, self._loaded = self._loaded, []
        fetched, rows, problem = self.loads.take_news()
        weights, changed = self.weights_watch.take_news()
        timed, self._timed = self._timed, None
        fallbacks = [] if self.blend_runner is None else self.blend_runner.fused.take_fallbacks()

        news = (saved, fetched, loaded, rows, problem, weights, changed, timed, fallbacks)
        return StepReport(*news) if any(news) else None

    def close(self, timeout: float = 30.0) -> None:
        """Close the store, after storing what is pending for at most `timeout` seconds."""
        self.loads.close()
        # Before the store is closed, to which its thread still writes.
        self.saver.close(timeout)
        # Before its memory goes, from which and to which a GPU may still be copying.
        self.paged.copies.close()
        self.store.close()

    def _copy(self, save: SaveOrder) -> None:
        meta = save.meta
        if self.weights_watch.problem:
            self.saver.drop(save.name, self.weights_watch.problem)
            return

        if self.paged.lacks(save.block_ids, meta.position + save.first, meta.position + save.stop):
            self.saver.drop(save.name, WINDOWS)
            return
        # Asked once, since later increments belong to a state that was admitted.
        if save.is_first and not self.store.admits(meta.id, meta.num_tokens, meta.partition):
            self.saver.drop(save.name, UNWANTED)
            return

        try:
            make_states = [self._prepare_snapshot(order) for order in save.snapshots]
            if save.stop > save.first:
                make_states.insert(0, self._prepare_save(save))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning(
                "no memory to copy the state of a prompt of %d tokens: %s", meta.num_tokens, error
            )
            self.saver.drop(save.name, NO_MEMORY)
            return

        self.saver.submit(save.name, make_states, self.weights_watch.comparison)

    def _prepare_snapshot(self, order: SnapshotOrder) -> StateMaker:
        """Copy a recurrent state now, and return the rest of the work for the saver's thread."""
        states = self.paged.states
        assert states is not None
        arrived = self._copy_to_host(
            (1, states.nbytes), lambda begin, end, into: states.copy(order.blocks, into[0])
        )

        @contextmanager
        def make_state() -> Generator[StoredState]:
            with arrived as pages:
                yield StoredState(order.meta, to_store(pages[0]))

        return make_state

    def _prepare_save(self, save: SaveOrder) -> StateMaker:
        """Copy the blocks now, and return the rest of the work for the saver's thread."""
        paged, meta, tokens = self.paged, save.meta, save.stop - save.first
        block, skip = divmod(meta.position + save.first, self.paged.block_tokens)
        part_meta = replace(meta, nbytes=tokens * paged.bytes_per_token)
        rows = [(save.first, save.stop)] if meta.kind == KV else None
        # Pages are copied whole, with the rows before the first one that is wanted.
        tokens += skip

        def copy_range(begin: int, end: int, into: torch.Tensor) -> None:
            count = min(tokens, end * paged.block_tokens) - begin * paged.block_tokens
            paged.copy_pages(save.block_ids, count, block + begin, into)

        arrived = self._copy_to_host(paged.pages_shape(tokens), copy_range)

        @contextmanager
        def make_state() -> Generator[StoredState]:
            with arrived as pages:
                if any(self.store.meta(donor) is None for donor in meta.metadata.get(DONORS, ())):
                    # They would have had to leave with it.
                    raise StoreError("a prompt that these rows were computed from was removed")
                if meta.kind == KV:
                    tensor = replace(to_store(pages[None, None, None]), page=paged.block_tokens)
                else:
                    # Rows of a blend begin anywhere.
                    tensor = to_store(paged.entries(pages, tokens)[:, :, :, skip:].contiguous())
                yield StoredState(part_meta, tensor, rows)

        return make_state

    def _copy_to_host(
        self, shape: tuple[int, int], copy: Callable[[int, int, torch.Tensor], object]
    ) -> AbstractContextManager[torch.Tensor]:
        """Begin to copy pages `[pages, bytes]` to host memory, as `CudaCopies.save` does.

        On a GPU the copy goes on when this method has returned. Entering the result waits for it
        and gives the copy; leaving it gives the memory back.
        """
        copies = self.paged.copies
        buffer: LentBuffer | LentRange
        event: torch.cuda.Event | None = None
        if isinstance(copies, CudaCopies):
            buffer = copies.host_memory(shape)
            event = copies.save(buffer.tensor, copy)
        else:
            buffer = self.buffers.lend(shape, torch.uint8)
            copy(0, shape[0], buffer.tensor)

        @contextmanager
        def arrived() -> Generator[torch.Tensor]:
            # Not the tensor alone: a lent range goes back when nothing refers to it any more.
            try:
                if event is not None:
                    event.synchronize()
                yield buffer.tensor
            finally:
                if isinstance(buffer, LentBuffer):
                    self.buffers.take_back(buffer)

        return arrived()
