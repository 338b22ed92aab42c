"""Loads, on the worker's side: stored states are read in threads and put into a request's blocks between steps.

A blend's rows are computed between steps too (`blend.blend`). With several ranks a blend begins when the scheduler says that all have
fetched what it begins from (`ranks`).
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from dejakv.engines.base import LATE, unread
from dejakv.engines.tensors import NAMES, borrowed
from dejakv.engines.vllm.blend.blend import FAILED, BlendRunner, BlendWorker
from dejakv.engines.vllm.blend.state import BlendState
from dejakv.engines.vllm.messages import IDLE_WAIT_S, LoadOrder, LoadResult, StepPlan
from dejakv.engines.vllm.pages import BufferPool, PagedKV
from dejakv.errors import InputError
from dejakv.store.base import KV, Rows, StoredState, joined
from dejakv.store.store import Store

Parts = Sequence[StoredState]
"""Chunks that hold some of a state's rows each, first rows first."""


log = logging.getLogger("dejakv.vllm")

GONE = "the donor's state is gone or cannot be read"
SHORT = "the donor's state is shorter than what was planned"
SLOW = "the load took too long"
STORE_FAILED = "the store failed"
DRAFT_FAILED = "the blend failed"


_Fetched = torch.Tensor | BlendState | str
"""Pages to copy as they are (they may be the store's own memory), a blend, or why there is neither."""


@dataclass
class _PendingLoad:
    """A load under way.

    begun     when a thread took it up
    until     when state in a bucket is given up
    told      the scheduler knows that its draft is here, and so do the other ranks: only its end or an order of the scheduler ends it
    begins    its blend may begin
    given_up  why it was given up, beside a problem of its blend
    """

    load: LoadOrder
    ordered: float
    begun: float | None = None
    until: float | None = None
    fetched: "Future[_Fetched] | None" = None
    told: bool = False
    begins: bool = False
    given_up: str = ""

    @property
    def arrived(self) -> _Fetched | None:
        """The fetched pages or blend, or the reason for neither; None while awaited."""
        return self.fetched.result() if self.fetched is not None and self.fetched.done() else None

    @property
    def blend(self) -> BlendState | None:
        """Its blend, once its draft is there."""
        arrived = self.arrived
        return arrived if isinstance(arrived, BlendState) else None

    @property
    def problem(self) -> str:
        """Why it is given up; empty if it is not."""
        return self.given_up or (self.blend.problem if self.blend is not None else "")

    @property
    def ready(self) -> bool:
        """Whether there is something to do in the engine loop."""
        return self.begins or (self.arrived is not None and not self.told)

    @property
    def goes_on(self) -> bool:
        """Whether there is more to fetch or to compute."""
        return not self.problem and (self.arrived is None or (self.blend is not None and not self.blend.over))


@dataclass
class LoadRunner:
    """The loads of one worker.

    timeout_s        a load fails whose data takes longer to read. The time in which it waits for a thread while these take up others, or a blend
                     for its share of steps, does not count
    max_draft_bytes  memory of blends that wait for their turn in the engine loop; further ones are not begun until then, and no larger one is
                     ordered
    mixer            None where blend is not possible
    """

    store: Store
    timeout_s: float
    buffers: BufferPool
    max_draft_bytes: int
    paged: PagedKV
    mixer: BlendWorker | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="dejakv-load"))
    _drafting: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="dejakv-draft")
    )
    _taken_up: dict[bool, float] = field(default_factory=dict[bool, float])
    _loading: list[_PendingLoad] = field(default_factory=list[_PendingLoad])
    _told: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def blender(self) -> BlendRunner | None:
        return self.mixer.blender if self.mixer is not None else None

    def order(self, loads: list[LoadOrder]) -> None:
        """Start reading the state of these loads."""
        now = time.monotonic()
        for load in loads:
            self._loading.append(_PendingLoad(load, now))
        self._begin()

    def give_up(self, why: str) -> None:
        """Fail all loads under way; `finish` reports them."""
        for item in self._loading:
            item.given_up = item.given_up or why

    def finish(self, plan: StepPlan, refused: str = "") -> list[LoadResult]:
        """Put arrived state into its blocks, compute rows of blends within the step's room, and return the finished loads. `refused`: why
        nothing may be put in."""
        # Nothing is computed in this step, so waiting a moment costs nobody.
        if plan.idle and self._loading and not any(item.ready for item in self._loading):
            self._wait()
        # Before the loop, since a blend may end with the rows of this step.
        self._mix(plan, refused)
        over: list[LoadResult] = []
        waiting: list[_PendingLoad] = []

        for item in self._loading:
            # The other ranks count on a reported draft: no rank gives it up alone.
            if item.goes_on and (item.told or not (refused or self._late(item))):
                waiting.append(item)
            else:
                over.append(self._put_in(item, refused))

        self._loading = waiting
        # Ended loads have made room for the next ones.
        self._begin()
        return over

    def take(self) -> tuple[list[tuple[str, str]], dict[str, int], str]:
        """News since the last call: `StepReport.fetched` and `rows`, and why blend must be switched off."""
        fetched_marks, self._told = self._told, []
        problem = ""
        if self.mixer is not None:
            problem, self.mixer.problem = self.mixer.problem, ""
        return fetched_marks, {item.load.request_id: self._rows(item) for item in self._loading if item.blend}, problem

    def close(self) -> None:
        for pool in (self._pool, self._drafting):
            pool.shutdown(wait=False, cancel_futures=True)

    def _rows(self, item: _PendingLoad) -> int:
        """Rows of steps left for a blend. Without room for those of the check it would never begin."""
        if item.blend is None or item.problem or self.blender is None:
            return 0
        return item.blend.left + self.blender.rows_checked(item.blend)

    def _wait(self) -> None:
        """Leaves the interpreter to the readers for a moment, those of other ranks too."""
        reading = [item.fetched for item in self._loading if item.fetched is not None and not item.fetched.done()]
        if reading:
            wait(reading, IDLE_WAIT_S, FIRST_COMPLETED)
        else:
            time.sleep(IDLE_WAIT_S)

    def _late(self, item: _PendingLoad) -> bool:
        """Whether its data should be there by now. One that waits for a thread is late if its threads have taken up none for so long."""
        if item.fetched is None or item.fetched.done():
            return False
        waits = max(item.ordered, self._taken_up.get(bool(item.load.blend), 0.0))
        return time.monotonic() >= (item.until or (waits if item.begun is None else item.begun) + self.timeout_s)

    def _begin(self) -> None:
        """Hand loads to the threads, in order, as memory allows: no draft overtakes another, or a large one might never begin. Drafts are made
        one at a time, since they take time from the engine loop."""
        draft_bytes, full = (
            sum(self._draft_bytes(item.load) for item in self._loading if item.fetched is not None),
            False,
        )
        for item in self._loading:
            if item.fetched is not None:
                continue
            item_bytes = self._draft_bytes(item.load)
            full = full or (item_bytes > 0 and draft_bytes + item_bytes > self.max_draft_bytes)
            if not item_bytes or not full:
                draft_bytes += item_bytes
                item.fetched = (self._drafting if item_bytes else self._pool).submit(self._fetch, item)

    def _draft_bytes(self, load: LoadOrder) -> int:
        return len(load.blend) * self.paged.bytes_per_token

    def _fetch(self, item: _PendingLoad) -> _Fetched:
        """In a thread: read the needed part of a state, or draft a blend; return the reason if neither is possible."""
        load = item.load
        now = item.begun = self._taken_up[bool(load.blend)] = time.monotonic()
        item.until = now + min(load.within, self.timeout_s) if load.within else None
        if load.blend:
            return self._drafted(load, item.until)
        # Pages are put in whole, from the block that holds the first token.
        first = load.start - load.start % self._block
        parts = self._read(load.donors[0], [(first, load.stop)], item.until)
        if isinstance(parts, str):
            return parts
        state = joined(parts, first, load.stop)
        return SHORT if state is None else borrowed(state)[0, 0, 0]

    @property
    def _block(self) -> int:
        return self.paged.block_tokens

    def _read(self, id: str, rows: Rows | None = None, until: float | None = None) -> Parts | str:
        """In a thread: what holds at least these rows, verified and of this model; None: all."""
        try:
            parts = self.store.get_parts(id, rows, until)
        except Exception as error:  # a store never raises on reading; one that does anyway costs a miss
            log.debug("a store failed", exc_info=True)
            return f"{STORE_FAILED}: {type(error).__name__}"

        if not parts:
            return unread(until, GONE)
        for part in parts:
            tokens, pages = part.stop - part.first, part.meta.kind == KV
            # State of another model or layout would be put in without an error.
            shape = (1, 1, 1, *self.paged.pages_shape(tokens)) if pages else self.paged.shape(tokens)
            if (part.tensor.shape, part.tensor.page) != (shape, self._block if pages else 1):
                return "the donor's state has another shape than this model's"
            if part.tensor.dtype != ("U8" if pages else NAMES.get(self.paged.dtype)):
                return "the donor's state has another dtype"
        return parts

    def _drafted(self, load: LoadOrder, until: float | None) -> BlendState | str:
        """In a thread too: token map, donors' rows, keys moved, what must be computed."""
        if self.blender is None:
            return "blend is not possible in this worker"
        # Looked up again: a donor may have been evicted since the plan.
        donor_metas = [(id, self.store.meta(id)) for id in load.donors]
        missing_reasons = (GONE,) * sum(meta is None for _, meta in donor_metas)
        metas = [meta for _, meta in donor_metas if meta is not None]

        try:
            read = partial(self._read, until=until)
            draft = self.blender.draft(load.blend, load.start, load.stop, metas, read, self.buffers, missing_reasons)
            return BlendState(draft, load.block_ids[0])
        except InputError as error:
            return str(error)
        except Exception as error:
            log.debug("a blend failed", exc_info=True)
            return f"{DRAFT_FAILED}: {type(error).__name__}"

    def _mix(self, plan: StepPlan, refused: str) -> None:
        """In the engine loop: begin blends that may, and compute rows."""
        if self.mixer is None:
            return
        mixing: list[BlendState] = []
        for item in self._loading:
            name, blend = item.load.request_id, item.blend
            item.given_up = item.given_up or plan.drop.get(name, "")
            if blend is None or item.problem:
                continue
            # Several ranks begin in the step that the scheduler names, a single one at once.
            item.begins = item.begins or not self._in_lockstep or name in plan.begin
            if item.begins:
                mixing.append(blend)
            elif not item.told and not refused:
                item.told = True
                self._told.append((name, blend.draft.mark))

        self.mixer.mix(mixing, plan.room, refused)

    def _put_in(self, item: _PendingLoad, refused: str) -> LoadResult:
        """Finish a load: put an exact state into its blocks, report a blend's. A problem is reported, not raised."""
        load = item.load
        if item.fetched is None or item.fetched.cancel():  # it was never begun
            item.fetched = None
        arrived = item.arrived
        late_reason = (LATE if item.until else f"{SLOW}: {self.timeout_s:g} s") if item.goes_on else ""
        problem = refused or item.problem or late_reason or (arrived if isinstance(arrived, str) else "")
        if not problem and isinstance(arrived, torch.Tensor):
            try:
                self.paged.put_pages(load.block_ids, arrived, load.start // self._block)
            except Exception as error:  # a load that fails costs time, never the engine: vLLM computes its blocks
                log.debug("a load failed", exc_info=True)
                problem = f"{FAILED}: {type(error).__name__}"

        if problem:
            # The other ranks wait for an answer: an empty mark drops the blend for all.
            if load.blend and not item.told and self._in_lockstep:
                self._told.append((load.request_id, ""))
            return LoadResult(load.request_id, 0, 0.0, problem=problem)

        seconds = time.monotonic() - item.ordered
        if not isinstance(arrived, BlendState):
            nbytes = load.tokens * self.paged.bytes_per_token
            return LoadResult(load.request_id, nbytes, seconds, donors=load.donors)
        draft = arrived.draft
        # Its rows are in the blocks, so the next draft may have the memory.
        if draft.lent is not None:
            self.buffers.take_back(draft.lent)
        log.debug("request %s: blended from %d donors, %s first", load.request_id, len(draft.donors), draft.donors[0])
        for why in draft.left_out:
            log.warning("a donor was left out of the blend of request %s: %s", load.request_id, why)
        nbytes = (draft.plan.end - load.start) * self.paged.bytes_per_token
        return LoadResult(
            load.request_id, nbytes, seconds, arrived.computed, "", draft.donors, draft.left_out, arrived.kept
        )

    @property
    def _in_lockstep(self) -> bool:
        """Whether other ranks wait for this one's answer about a blend."""
        return self.mixer is not None and self.mixer.blender.lockstep.ranks > 1
