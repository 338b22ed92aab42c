"""Loads, on the worker's side: stored states are read in threads and put into a request's blocks between steps.

A blend's rows are computed between steps too: those of all blends that are ready in one forward, and no more of them than the step
has room for beside what vLLM computed in it.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from dejakv.engines.tensors import NAMES, borrowed
from dejakv.engines.vllm.blend import Blender
from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.drafts import Draft
from dejakv.engines.vllm.messages import IDLE_WAIT_S, Load, Loaded
from dejakv.engines.vllm.mixing import Mixing
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.reads import Reads
from dejakv.errors import InputError, ModelError
from dejakv.store.base import Chunk, Store

log = logging.getLogger("dejakv.vllm")

LEAST_ROWS = 128
"""Rows of blends that even a full step computes, so that they come to an end."""
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
    mixing: Mixing | None = None
    problem: str = ""

    @property
    def arrived(self) -> "_Fetched | str | None":
        """What was fetched, or why nothing was; None while it is not there."""
        return self.fetched.result() if self.fetched is not None and self.fetched.done() else None


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

    def finish(self, *, idle: bool, room: int, refused: str = "") -> list[Loaded]:
        """Puts what has arrived into its blocks, and computes rows of blends; the loads that are over.

        idle     nothing is computed in this step, so waiting a moment costs nobody
        room     tokens that the step might have computed and did not
        refused  why nothing may be put in
        """
        begun = [item.fetched for item in self._loading if item.fetched is not None]
        if idle and begun and not any(future.done() for future in begun):
            wait(begun, IDLE_WAIT_S, FIRST_COMPLETED)  # leave the interpreter to the readers
        self._mix([] if refused else self._loading, max(room, LEAST_ROWS))
        over: list[Loaded] = []
        waiting: list[_Loading] = []
        for item in self._loading:
            if not refused and self._goes_on(item) and time.monotonic() < item.deadline:
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

    def _mix(self, loading: list[_Loading], room: int) -> None:
        """In the engine loop: begins the blends whose drafts have arrived, as long as there is room for their questions, and
        computes rows of all that have begun."""
        began: list[_Loading] = []
        for item in loading:
            arrived = item.arrived
            if isinstance(arrived, _Fetched) and arrived.draft is not None and not item.problem:
                if item.mixing is None and room > 0:
                    self._attempt([item], lambda item=item, draft=arrived.draft: self._begin_mixing(item, draft))
                    room -= item.mixing.asked if item.mixing is not None else 0
                if item.mixing is not None:
                    began.append(item)
        if began:
            assert self.blender is not None
            blender, blends = self.blender, [item.mixing for item in began if item.mixing is not None]
            self._attempt(began, lambda: blender.advance(blends, room))

    def _begin_mixing(self, item: _Loading, draft: Draft) -> None:
        assert self.blender is not None
        item.mixing = self.blender.begin(draft, item.load.block_ids)

    def _attempt(self, items: list[_Loading], step: Callable[[], object]) -> None:
        """A load that fails costs time, never the engine: vLLM computes its blocks."""
        try:
            step()
        except ModelError as error:
            self.problem = str(error)
            for item in items:
                item.problem = f"the load failed: {error}"
        except Exception as error:
            for item in items:
                item.problem = f"the load failed: {type(error).__name__}: {error}"

    @staticmethod
    def _goes_on(item: _Loading) -> bool:
        """Whether there is more to fetch or to compute."""
        if item.problem:
            return False
        if item.mixing is not None:
            return len(item.mixing.rows) > 0
        arrived = item.arrived
        return arrived is None or (isinstance(arrived, _Fetched) and arrived.draft is not None)

    def _put_in(self, item: _Loading, refused: str) -> Loaded:
        """The end of a load: an exact state is put into its blocks now, a blend's is there."""
        assert self.paged is not None
        load = item.load
        if item.fetched is None or item.fetched.cancel():  # it was never begun
            self._reads.done(load.donors)
            item.fetched = None
        arrived, mixing = item.arrived, item.mixing
        late = f"the load took longer than {self.timeout_s:g} s" if arrived is None or self._goes_on(item) else ""
        problem = refused or item.problem or late or (arrived if isinstance(arrived, str) else "")
        if not problem and isinstance(arrived, _Fetched) and arrived.state is not None:
            state = arrived.state
            self._attempt([item], lambda: self.paged and self.paged.scatter(load.block_ids, load.start, state))
            problem = item.problem
        if problem:
            return Loaded(load.request_id, 0, 0.0, problem=problem)
        seconds = time.perf_counter() - item.began
        if mixing is None:
            nbytes = load.tokens * self.paged.bytes_per_token
            return Loaded(load.request_id, nbytes, seconds, donors=load.donors)
        draft = mixing.draft
        if draft.lent is not None:
            self.buffers.take_back(draft.lent)
        log.debug("request %s: blended from %d donors, %s first", load.request_id, len(draft.donors), draft.donors[0])
        for why in draft.left_out:
            log.warning("a donor was left out of the blend of request %s: %s", load.request_id, why)
        nbytes = (draft.plan.end - load.start) * self.paged.bytes_per_token
        return Loaded(load.request_id, nbytes, seconds, mixing.computed, "", draft.donors, draft.left_out)
