"""The connector's worker side: copies KV out of vLLM's blocks and into them, as the scheduler side orders.

Disk is touched in threads only. The engine loop pays for copies between host memory and the KV cache and for the check of the weights; for
a blend it also pays for the rows that are recomputed (`loads`).
"""

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch

from dejakv.engines.tensors import to_store
from dejakv.engines.vllm.blend.blend import BlendRunner, BlendWorker
from dejakv.engines.vllm.generations import RESET, WeightsWatch
from dejakv.engines.vllm.loads import LoadRunner
from dejakv.engines.vllm.messages import LoadResult, SaveOrder, StepPlan, StepReport, TimedStep
from dejakv.engines.vllm.pages import BufferPool, PagedKV, to_host
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

Make = Callable[[], AbstractContextManager[StoredState]]
"""Makes the chunk; its memory may be used for something else when the context ends."""


class SaveWorker:
    """Stores copies of KV one after the other, in a thread. The scheduler side limits their number (`saves`)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dejakv-save")
        self._under_way: dict[str, Future[str]] = {}
        self._dropped: list[tuple[str, str]] = []

    def drop(self, name: str, why: str) -> None:
        """Report a save that was not even copied."""
        self._dropped.append((name, why))

    def submit(self, name: str, make_state: Make) -> None:
        """Store a chunk, or some rows of one, made by `make_state` in the thread."""
        self._under_way[name] = self._pool.submit(self._put, make_state)

    def take(self) -> list[tuple[str, str]]:
        """Names of saves that ended since the last call, each with the reason if it is not stored, else ""."""
        over = [(name, put.result()) for name, put in self._under_way.items() if put.done()]
        for name, _ in over:
            del self._under_way[name]
        dropped, self._dropped = self._dropped, []
        return [*over, *dropped]

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; False after `timeout` seconds."""
        return not wait(list(self._under_way.values()), timeout).not_done

    def close(self, timeout: float) -> None:
        """Stores what is pending, for at most `timeout` seconds, and says what that is."""
        pending = sum(not put.done() for put in self._under_way.values())
        if pending:
            log.warning("stopping: %d parts of prompts are still to be stored, for at most %g s", pending, timeout)
        if not self.flush(timeout):
            unstored = sum(not put.done() for put in self._under_way.values())
            log.warning(
                "stopped: %d of these %d parts of prompts were not stored within %g s", unstored, pending, timeout
            )
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, make_state: Make) -> str:
        """Store a chunk; return why it is not stored, or ""."""
        try:
            with make_state() as chunk:
                return "" if self._store.put(chunk) else REFUSED
        except Exception as error:  # whatever is wrong with a store, it costs this save and nothing else
            why = f"error: {type(error).__name__}: {error}"
            log.warning("the state of a prompt was not stored: %s", why)
            return why


KEEP_BYTES = 128 << 20
"""Host memory that is kept for the next copies."""


@dataclass
class WorkerSide:
    """The connector in a worker, one instance. `blender`: None if blend is not possible."""

    store: Store
    paged: PagedKV
    blender: BlendRunner | None
    watch: WeightsWatch
    load_timeout_s: float
    max_pending_bytes: int
    _loaded: list[LoadResult] = field(default_factory=list[LoadResult])
    _timed: TimedStep | None = None

    def __post_init__(self) -> None:
        self.saver, self.buffers = SaveWorker(self.store), BufferPool(KEEP_BYTES)
        blend_worker = None if self.blender is None else BlendWorker(self.blender)
        self.loads = LoadRunner(
            self.store, self.load_timeout_s, self.buffers, self.max_pending_bytes, self.paged, blend_worker
        )

    def start_loads(self, plan: StepPlan) -> None:
        """Check the weights, then read the chunks of this step's loads, in threads."""
        using = bool(plan.saves or plan.loads or len(self.loads))
        # State of the generation before must not get into blocks of this one.
        if self.watch.step(plan.generation, computing=plan.computing, using=using):
            self.loads.give_up(RESET)
        self.loads.order(plan.loads)

    def copy_saves(self, plan: StepPlan) -> None:
        """Copies the state of this step's saves; storing it is the saver's business."""
        for save in plan.saves:
            if save.generation == plan.generation:
                self._copy(save)
            else:  # ordered in the step in which a change of the weights was noticed
                self.saver.drop(save.name, RESET)

    def finish(self, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
        """Put arrived states into their blocks. Returns request ids: blocks to release, finished loads, failed ones of them."""
        loaded = self.loads.finish(plan, self.watch.problem)
        self._loaded += loaded
        self._timed = plan.timed
        failed = {load_result.request_id for load_result in loaded if load_result.problem}
        return set(plan.releases), {load_result.request_id for load_result in loaded}, failed

    def report(self) -> StepReport | None:
        """News since the last report; None without any."""
        saved = self.saver.take()
        loaded, self._loaded = self._loaded, []
        fetched, rows, problem = self.loads.take()
        weights, changed = self.watch.take()
        timed, self._timed = self._timed, None

        if not (saved or fetched or loaded or rows or problem or weights or changed or timed):
            return None
        return StepReport(saved, fetched, loaded, rows, problem, weights, changed, timed)

    def close(self, timeout: float = 30.0) -> None:
        """End, after storing for at most `timeout` seconds."""
        self.loads.close()
        # Before the store is closed, to which its thread still writes.
        self.saver.close(timeout)
        self.store.close()

    def _copy(self, save: SaveOrder) -> None:
        meta = save.meta
        if self.watch.problem:
            self.saver.drop(save.name, self.watch.problem)
            return
        if self.paged.lacks(save.block_ids, meta.position + save.first, meta.position + save.stop):
            self.saver.drop(save.name, WINDOWS)
            return
        # Asked once: later increments are of a chunk that was admitted.
        if save.begins and not self.store.wants(meta.id, meta.num_tokens, meta.partition):
            self.saver.drop(save.name, UNWANTED)
            return
        try:
            make_state = self._made(save)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to copy the state of a prompt of %d tokens: %s", meta.num_tokens, error)
            self.saver.drop(save.name, NO_MEMORY)
            return

        self.saver.submit(save.name, make_state)

    def _made(self, save: SaveOrder) -> Make:
        """Copy the blocks now; return the rest of the work for the saver's thread."""
        paged, meta, tokens = self.paged, save.meta, save.stop - save.first
        block, skip = divmod(meta.position + save.first, self.paged.block_tokens)
        part_meta = replace(meta, nbytes=tokens * paged.bytes_per_token)
        rows = [(save.first, save.stop)] if meta.kind == KV else None
        # Pages are copied whole, with the rows before the first one that is wanted.
        tokens += skip
        # Pinned memory of its own: the copy goes on when this method has returned.
        if paged.device.type == "cuda":
            buffer, (pages, event) = None, to_host(paged.copy_pages(save.block_ids, tokens, block))
        else:
            buffer, event = self.buffers.lend(paged.pages_shape(tokens), torch.uint8), None
            pages = paged.copy_pages(save.block_ids, tokens, block, buffer.tensor)

        @contextmanager
        def make() -> Generator[StoredState]:
            if event is not None:
                event.synchronize()
            try:
                if any(self.store.meta(donor) is None for donor in meta.metadata.get(DONORS, ())):
                    # They would have had to leave with it.
                    raise StoreError("a prompt that these rows were computed from was removed")
                if meta.kind == KV:
                    tensor = replace(to_store(pages[None, None, None]), page=paged.block_tokens)
                else:  # rows of a blend begin anywhere
                    tensor = to_store(paged.entries(pages, tokens)[:, :, :, skip:].contiguous())
                yield StoredState(part_meta, tensor, rows)
            finally:
                if buffer is not None:
                    self.buffers.take_back(buffer)

        return make
