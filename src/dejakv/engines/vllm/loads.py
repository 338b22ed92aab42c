"""Loads, on the worker's side: stored states are read in threads and put into a request's blocks between steps."""

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from dejakv.engines.tensors import NAMES, borrowed
from dejakv.engines.vllm.blend import Blender
from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.drafts import Draft
from dejakv.engines.vllm.messages import IDLE_WAIT_S, Load, Loaded
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.reads import Reads
from dejakv.errors import InputError, ModelError
from dejakv.store.base import Chunk, Store

log = logging.getLogger("dejakv.vllm")

GONE = "the donor's state is gone or cannot be read"


@dataclass(frozen=True)
class _Fetched:
    """A state to copy as it is (the store's own memory), or what a blend starts from."""

    state: torch.Tensor | None = None
    draft: Draft | None = None


@dataclass
class _Loading:
    load: Load
    deadline: float
    began: float
    fetched: "Future[_Fetched | str] | None" = None

    @property
    def done(self) -> bool:
        return self.fetched is not None and self.fetched.done()


@dataclass
class Loads:
    """The loads of one worker.

    timeout_s        a load that takes longer fails
    max_draft_bytes  memory of blends that wait for their turn in the engine loop; further ones are not begun until then
    problem          why blend must be switched off, until it is taken
    """

    store: Store
    timeout_s: float
    buffers: Buffers
    max_draft_bytes: int
    paged: PagedKV | None = None
    blender: Blender | None = None
    problem: str = ""
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="dejakv-load"))
    _loading: list[_Loading] = field(default_factory=list[_Loading])

    def __post_init__(self) -> None:
        self._reads = Reads(self.store)

    def __len__(self) -> int:
        return len(self._loading)

    def order(self, loads: list[Load]) -> None:
        """Begins to read what these loads need."""
        now = time.monotonic()
        for load in loads:
            self._reads.expect(load.donors)
            self._loading.append(_Loading(load, now + self.timeout_s, time.perf_counter()))
        self._begin()

    def finish(self, *, idle: bool, refused: str = "") -> list[Loaded]:
        """Puts what has arrived into its blocks; the loads that are over.

        idle     nothing is computed in this step, so waiting a moment costs nobody
        refused  why nothing may be put in
        """
        begun = [item.fetched for item in self._loading if item.fetched is not None]
        if idle and begun and not any(future.done() for future in begun):
            wait(begun, IDLE_WAIT_S, FIRST_COMPLETED)  # leave the interpreter to the readers
        over: list[Loaded] = []
        waiting: list[_Loading] = []
        for item in self._loading:
            if not item.done and time.monotonic() < item.deadline:
                waiting.append(item)
            else:
                over.append(self._put_in(item, refused))
        self._loading = waiting
        self._begin()
        return over

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Hands to the threads what there is memory for, in order: at least one blend at a time."""
        held = sum(self._draft_bytes(item.load) for item in self._loading if item.fetched is not None)
        for item in self._loading:
            if item.fetched is not None:
                continue
            more = self._draft_bytes(item.load)
            if not more or not held or held + more <= self.max_draft_bytes:
                held += more
                item.fetched = self._pool.submit(self._fetch, item.load)

    def _draft_bytes(self, load: Load) -> int:
        assert self.paged is not None
        return len(load.blend) * self.paged.bytes_per_token

    def _fetch(self, load: Load) -> "_Fetched | str":
        """In a thread: the part of a state that is needed, or the draft of a blend; or why there is none."""
        try:
            if load.blend:
                return self._drafted(load)
            chunk = self._read(load.donor)
            if isinstance(chunk, str):
                return chunk
            if chunk.meta.num_tokens < load.stop:
                return "the donor's state is shorter than what was planned"
            return _Fetched(borrowed(chunk.tensor)[:, :, :, load.start : load.stop])
        finally:
            self._reads.done(load.donors)

    def _read(self, id: str) -> Chunk | str:
        """In a thread: a chunk, whole, verified and of this model."""
        assert self.paged is not None
        try:
            chunk = self._reads.read(id)
        except Exception as error:  # a store never raises on reading; one that does anyway costs a miss
            return f"the store failed: {type(error).__name__}: {error}"
        if chunk is None:
            return GONE
        if chunk.tensor.shape != self.paged.shape(chunk.meta.num_tokens):
            return "the donor's state has another shape than this model's"
        if chunk.tensor.dtype != NAMES.get(self.paged.dtype):
            return "the donor's state has another dtype"
        return chunk

    def _drafted(self, load: Load) -> "_Fetched | str":
        """In a thread too: token map, donors' rows, keys moved, what must be computed."""
        if self.blender is None:
            return "blend is not possible in this worker"
        known = [(id, self.store.meta(id)) for id in load.donors]
        gone = (GONE,) * sum(meta is None for _, meta in known)
        metas = [meta for _, meta in known if meta is not None]
        try:
            draft = self.blender.draft(load.blend, load.start, load.stop, metas, self._read, self.buffers, gone)
            return _Fetched(draft=draft)
        except InputError as error:
            return str(error)
        except Exception as error:
            return f"the blend failed: {type(error).__name__}: {error}"

    def _put_in(self, item: _Loading, refused: str) -> Loaded:
        assert self.paged is not None
        load, future = item.load, item.fetched
        if future is None or future.cancel():  # it was never begun
            self._reads.done(load.donors)
            future = None
        if refused:
            return Loaded(load.request_id, 0, 0.0, problem=refused)
        if future is None or not future.done():
            return Loaded(load.request_id, 0, 0.0, problem=f"the load took longer than {self.timeout_s:g} s")
        fetched = future.result()
        if isinstance(fetched, str):
            return Loaded(load.request_id, 0, 0.0, problem=fetched)
        draft, computed = fetched.draft, 0
        try:
            state = fetched.state
            if state is None:
                assert draft is not None
                state, computed = self._mix(load, draft)
            self.paged.scatter(load.block_ids, load.start, state)
        except Exception as error:  # the blocks are recomputed by vLLM: a failed load costs time, never the engine
            return Loaded(load.request_id, 0, 0.0, problem=f"the load failed: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - item.began
        if draft is None:
            return Loaded(load.request_id, state.nbytes, seconds, donors=load.donors)
        if draft.lent is not None:
            self.buffers.take_back(draft.lent)
        log.debug("request %s: blended from %d donors, %s first", load.request_id, len(draft.donors), draft.donors[0])
        for why in draft.left_out:
            log.warning("a donor was left out of the blend of request %s: %s", load.request_id, why)
        return Loaded(load.request_id, state.nbytes, seconds, computed, "", draft.donors, draft.left_out)

    def _mix(self, load: Load, draft: Draft) -> tuple[torch.Tensor, int]:
        """In the engine loop: the rows that need it. The tokens before `load.start` stand as vLLM holds them."""
        assert self.paged is not None
        assert self.blender is not None
        why = self.blender.check(draft.proof)
        if why:
            self.problem = why
            raise ModelError(why)
        exact = self.paged.gather(load.block_ids, load.start) if load.start else None
        mixed = self.blender.mix(draft, exact)
        return mixed.state[:, :, :, load.start :], mixed.computed
