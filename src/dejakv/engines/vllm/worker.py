"""The connector's worker side: copies KV out of vLLM's blocks and into them, as the scheduler side orders.

Disk is touched in threads only. The engine loop pays for copies between host memory and the KV cache, nothing else; for a
blend it also pays for the rows that are recomputed.
"""

import logging
import time
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from dejakv.engines.tensors import borrowed, to_store
from dejakv.engines.vllm.blend import Blender, Draft
from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.messages import IDLE_WAIT_S, Load, Loaded, Save, StepPlan, StepReport
from dejakv.engines.vllm.paged import PagedKV, to_host
from dejakv.engines.vllm.saver import Make, Saver
from dejakv.engines.vllm.watch import Watch
from dejakv.errors import InputError, ModelError
from dejakv.models.memory import is_out_of_memory
from dejakv.store.admission import AdmittingStore
from dejakv.store.base import Chunk, Store, load_rows

log = logging.getLogger("dejakv.vllm")

KEEP_BYTES = 128 << 20
"""Host memory that is kept for the next copies."""


@dataclass(frozen=True)
class _Fetched:
    """A chunk with the part of its state to copy as it is (the store's own memory), or with what a blend starts from."""

    chunk: Chunk
    state: torch.Tensor | None
    draft: Draft | None = None


@dataclass
class _Loading:
    load: Load
    fetched: "Future[_Fetched | str]"
    deadline: float
    began: float


@dataclass
class WorkerSide:
    """One instance in the worker.

    blender  None where blend is not possible
    """

    store: Store
    saver: Saver
    load_timeout_s: float
    paged: PagedKV | None = None
    blender: Blender | None = None
    watch: Watch = field(default_factory=lambda: Watch(None))
    problem: str = ""
    buffers: Buffers = field(default_factory=lambda: Buffers(KEEP_BYTES))
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="dejakv-load"))
    _loading: list[_Loading] = field(default_factory=list[_Loading])
    _loaded: list[Loaded] = field(default_factory=list[Loaded])
    _released: set[str] = field(default_factory=set[str])

    def start_loads(self, plan: StepPlan) -> None:
        """Looks at the weights, then reads the chunks of this step's loads, in threads."""
        using = bool(plan.saves or plan.loads or self._loading)
        self.watch.step(plan.generation, computing=plan.computing, using=using)
        now = time.monotonic()
        for load in plan.loads:
            fetched = self._pool.submit(self._fetch, load)
            self._loading.append(_Loading(load, fetched, now + self.load_timeout_s, time.perf_counter()))

    def copy_saves(self, plan: StepPlan) -> None:
        """Copies the state of this step's saves; storing it is the saver's business."""
        for save in plan.saves:
            if save.generation == plan.generation:
                self._copy(save)
            else:  # ordered in the step in which a change of the weights was noticed
                self.saver.drop(save.meta.id, "a reset: the weights may have changed")
            if save.release is not None:
                self._released.add(save.release)

    def finish(self, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
        """Puts arrived states into their blocks. Request ids: blocks to release, loads that are over, failed ones of them."""
        if plan.idle and self._loading and not any(item.fetched.done() for item in self._loading):
            # Nothing is computed: leave the interpreter to the readers.
            wait([item.fetched for item in self._loading], IDLE_WAIT_S, FIRST_COMPLETED)
        over: set[str] = set()
        failed: set[str] = set()
        waiting: list[_Loading] = []
        for item in self._loading:
            if not item.fetched.done() and time.monotonic() < item.deadline:
                waiting.append(item)
                continue
            loaded = self._put_in(item)
            self._loaded.append(loaded)
            over.add(item.load.request_id)
            if loaded.problem:
                failed.add(item.load.request_id)
        self._loading = waiting
        released, self._released = self._released, set()
        return released, over, failed

    def report(self) -> StepReport | None:
        """What is confirmed since the last report; None if nothing is."""
        stored, dropped = self.saver.take()
        loaded, self._loaded = self._loaded, []
        problem, self.problem = self.problem, ""
        weights, changed = self.watch.take()
        if not (stored or dropped or loaded or problem or weights or changed):
            return None
        return StepReport(stored, list(dropped.items()), loaded, problem, weights, changed)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.saver.close()
        self.store.close()

    def _copy(self, save: Save) -> None:
        assert self.paged is not None
        if self.watch.problem:
            self.saver.drop(save.meta.id, self.watch.problem)
            return
        tokens = save.meta.num_tokens
        nbytes = tokens * self.paged.bytes_per_token
        if isinstance(self.store, AdmittingStore) and not self.store.wants(save.meta.id, tokens, save.meta.partition):
            self.saver.drop(save.meta.id, "admission: the store does not want it")
            return
        if not self.saver.has_room(save.meta.id, nbytes):
            return
        try:
            made = self._made(save, nbytes)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to copy the state of a prompt of %d tokens: %s", tokens, error)
            self.saver.drop(save.meta.id, "out of memory: the copy of the state could not be made")
            return
        self.saver.submit(save.meta.id, nbytes, made)

    def _made(self, save: Save, nbytes: int) -> Make:
        """Copies the blocks now; what remains to be done with the copy is left to the saver's thread."""
        assert self.paged is not None
        paged, tokens = self.paged, save.meta.num_tokens
        if paged.device.type == "cuda":
            lent, (pages, event) = None, to_host(paged.copy_pages(save.block_ids, tokens))
        else:
            lent, event = self.buffers.lend(paged.pages_shape(tokens), paged.dtype), None
            pages = paged.copy_pages(save.block_ids, tokens, lent.tensor)

        @contextmanager
        def make() -> Generator[Chunk]:
            if event is not None:
                event.synchronize()
            state = self.buffers.lend(paged.shape(tokens), paged.dtype)
            try:
                paged.unpack(pages, tokens, state.tensor)
                yield Chunk(replace(save.meta, nbytes=nbytes), to_store(state.tensor))
            finally:
                self.buffers.take_back(state)
                if lent is not None:
                    self.buffers.take_back(lent)

        return make

    def _fetch(self, load: Load) -> "_Fetched | str":
        """In a thread: the chunk, verified, and the part that is needed of it."""
        assert self.paged is not None
        try:
            # Of a blend's donor every row may be of use.
            chunk = self.store.get(load.donor) if load.blend else load_rows(self.store, load.donor, [(0, load.stop)])
        except Exception as error:  # a store never raises on reading; one that does anyway costs a miss
            return f"the store failed: {type(error).__name__}: {error}"
        if chunk is None:
            return "the donor's state is gone or cannot be read"
        if chunk.tensor.shape != self.paged.shape(chunk.meta.num_tokens):
            return "the donor's state has another shape than this model's"
        if load.blend:
            return self._draft(load, chunk)
        if chunk.meta.num_tokens < load.stop:
            return "the donor's state is shorter than what was planned"
        part = borrowed(chunk.tensor)[:, :, :, load.start : load.stop]
        return _Fetched(chunk, part) if part.dtype == self.paged.dtype else "the donor's state has another dtype"

    def _draft(self, load: Load, chunk: Chunk) -> "_Fetched | str":
        """In a thread too: the token map, the keys moved, what must be computed."""
        if self.blender is None:
            return "blend is not possible in this worker"
        try:
            return _Fetched(chunk, None, self.blender.draft(load.blend, load.stop, chunk, self.buffers))
        except InputError as error:
            return str(error)
        except Exception as error:
            return f"the blend failed: {type(error).__name__}: {error}"

    def _mix(self, load: Load, chunk: Chunk, draft: Draft) -> tuple[torch.Tensor, int]:
        """In the engine loop: the rows that need it. The tokens before `load.start` stand as vLLM holds them."""
        assert self.paged is not None
        assert self.blender is not None
        why = self.blender.check(chunk)
        if why:
            self.problem = why
            raise ModelError(why)
        exact = self.paged.gather(load.block_ids, load.start) if load.start else None
        mixed = self.blender.mix(draft, exact)
        return mixed.state[:, :, :, load.start :], mixed.computed

    def _put_in(self, item: _Loading) -> Loaded:
        assert self.paged is not None
        load = item.load
        if self.watch.problem:
            return Loaded(load.request_id, 0, 0.0, problem=self.watch.problem)
        if not item.fetched.done():
            item.fetched.cancel()
            return Loaded(load.request_id, 0, 0.0, problem=f"the load took longer than {self.load_timeout_s:g} s")
        fetched = item.fetched.result()
        if isinstance(fetched, str):
            return Loaded(load.request_id, 0, 0.0, problem=fetched)
        computed = 0
        try:
            state = fetched.state
            if state is None:
                assert fetched.draft is not None
                state, computed = self._mix(load, fetched.chunk, fetched.draft)
            self.paged.scatter(load.block_ids, load.start, state)
            if fetched.draft is not None and fetched.draft.lent is not None:
                self.buffers.take_back(fetched.draft.lent)
        except Exception as error:  # the blocks are recomputed by vLLM: a failed load costs time, never the engine
            return Loaded(load.request_id, 0, 0.0, problem=f"the load failed: {type(error).__name__}: {error}")
        return Loaded(load.request_id, state.nbytes, time.perf_counter() - item.began, computed)
