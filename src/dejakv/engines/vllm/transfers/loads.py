"""Loads, on the worker side: states are read in threads and put into blocks between steps.

A blend's rows are computed between steps too (`blend.blend`). With several ranks a blend begins
when the scheduler says that all ranks have fetched what it begins from (`ranks`).
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from dejakv.engines.base import LATE, unread_reason
from dejakv.engines.tensors import DTYPE_NAMES, tensor_view
from dejakv.engines.vllm.blend.blend import FAILED, BlendRunner, BlendWorker
from dejakv.engines.vllm.blend.state import BlendState
from dejakv.engines.vllm.device import PIN_WAIT_S, CudaCopies, LentRange
from dejakv.engines.vllm.generations import WeightsWatch
from dejakv.engines.vllm.messages import IDLE_WAIT_S, LoadOrder, LoadResult, StepPlan
from dejakv.engines.vllm.pages import BufferPool, PagedKV
from dejakv.errors import InputError
from dejakv.store.base import KV, SNAPSHOT, Rows, StoredState, joined
from dejakv.store.store import Store

Parts = Sequence[StoredState]
"""Parts of a stored state, each with some of its rows, first rows first."""


log = logging.getLogger("dejakv.vllm")

GONE = "the donor's state is gone or cannot be read"
SHORT = "the donor's state is shorter than what was planned"
SLOW = "the load took too long"
STORE_FAILED = "the store failed"
DRAFT_FAILED = "the blend failed"


_Fetched = torch.Tensor | LentRange | BlendState | str
"""Pages to copy as they are, a blend, or the reason for neither.

Pages may be the store's own memory, which must not be written to, or lent pinned memory, from which
they go to a GPU on a stream of their own."""


@dataclass
class _PendingLoad:
    """A load under way.

    Attributes
    ----------
    ordered, begun : float
        Monotonic times of the order and of the thread's start.
    until : float or None
        Monotonic time when the read of state in a bucket is given up.
    fetched : Future[_Fetched] or None
        Result of the thread; None while the load waits for memory.
    reported : bool
        The scheduler and the other ranks know that the draft is here, so that only its end or an
        order of the scheduler ends the load.
    may_begin : bool
        Whether its blend may begin.
    copied : torch.cuda.Event or None
        On a GPU: passes when pinned pages are in the blocks. Until then the load cannot end, since
        the blocks are being written to.
    check : int or None
        Number of the check of the weights that the load's end waits for.
    failure : str
        Why the load was given up, beside a problem of its blend.
    state : Tensor, shape [bytes], uint8, or None
        The recurrent state behind the load, which the thread has read before `fetched` is done.
    """

    load: LoadOrder
    ordered: float
    begun: float | None = None
    until: float | None = None
    fetched: "Future[_Fetched] | None" = None
    reported: bool = False
    may_begin: bool = False
    copied: torch.cuda.Event | None = None
    check: int | None = None
    failure: str = ""
    state: torch.Tensor | None = None

    @property
    def arrived(self) -> _Fetched | None:
        """The fetched pages or blend, or the reason for neither; None while they are awaited."""
        return self.fetched.result() if self.fetched is not None and self.fetched.done() else None

    @property
    def blend(self) -> BlendState | None:
        """Its blend, once the draft is there."""
        arrived = self.arrived
        return arrived if isinstance(arrived, BlendState) else None

    @property
    def problem(self) -> str:
        """Why the load is given up; empty while it goes on."""
        return self.failure or (self.blend.problem if self.blend is not None else "")

    @property
    def ready(self) -> bool:
        """Whether there is work in the engine loop."""
        if self.copied is not None:
            return self.copied.query()
        return self.may_begin or (self.arrived is not None and not self.reported)

    @property
    def goes_on(self) -> bool:
        """Whether there is more to fetch or to compute."""
        return not self.problem and (
            self.arrived is None or (self.blend is not None and not self.blend.over)
        )


@dataclass
class LoadRunner:
    """Runs the loads of one worker.

    Attributes
    ----------
    timeout_s : float
        Maximum seconds to read a load's data. Time in which a load waits while the threads take up
        others, or a blend waits for its share of steps, does not count.
    max_draft_bytes : int
        Memory of blends that wait for their turn in the engine loop. Further blends are not begun
        until then, and no larger blend is ordered.
    blend_worker : BlendWorker or None
        None where blends are not possible.
    weights_watch : WeightsWatch
        Checks of the weights, for which ends of loads wait on a GPU.
    """

    store: Store
    timeout_s: float
    buffers: BufferPool
    max_draft_bytes: int
    paged: PagedKV
    blend_worker: BlendWorker | None = None
    weights_watch: WeightsWatch = field(default_factory=lambda: WeightsWatch(None))
    _taken_up: dict[bool, float] = field(default_factory=dict[bool, float])
    _loading: list[_PendingLoad] = field(default_factory=list[_PendingLoad])
    _fetched_marks: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        enter = self.paged.copies.enter_thread
        self._pool = ThreadPoolExecutor(2, "dejakv-load", enter)
        self._drafting = ThreadPoolExecutor(1, "dejakv-draft", enter)

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def blend_runner(self) -> BlendRunner | None:
        """The runner of blends, or None where they are not possible."""
        return self.blend_worker.blend_runner if self.blend_worker is not None else None

    def order(self, loads: list[LoadOrder]) -> None:
        """Start to read the state of these loads."""
        now = time.monotonic()
        for load in loads:
            self._loading.append(_PendingLoad(load, now))
        self._begin()
        # vLLM calls this behind the forward that it has launched: the copies begin when that ends.
        self._copy_arrived()

    def give_up(self, why: str) -> None:
        """Fail all loads under way; `finish` reports them."""
        for item in self._loading:
            item.failure = item.failure or why

    def finish(self, plan: StepPlan, refused: str = "") -> list[LoadResult]:
        """Put arrived state into its blocks and compute rows of blends.

        Parameters
        ----------
        plan : StepPlan
            The scheduler's plan for this step, with the room for rows.
        refused : str
            Why nothing may be put into blocks; empty if it may.

        Returns
        -------
        list[LoadResult]
            The finished loads, failed ones among them.
        """
        # Nothing is computed in this step, so waiting a moment costs nobody.
        if plan.idle and self._loading and not any(item.ready for item in self._loading):
            self._wait()

        # Before the loop, since a blend may end with the rows of this step.
        self._mix(plan, refused)
        if not refused:
            self._copy_arrived()
        over: list[LoadResult] = []
        waiting: list[_PendingLoad] = []
        for item in self._loading:
            # The other ranks count on a reported draft: no rank gives it up alone.
            goes_on = item.goes_on and (item.reported or not (refused or self._late(item)))
            if goes_on or self._unsettled(item, refused):
                waiting.append(item)
            else:
                # Its check may just have told that the weights changed.
                over.append(self._put_in(item, refused or self.weights_watch.problem))

        self._loading = waiting
        # Ended loads have made room for the next ones.
        self._begin()
        return over

    def _copy_arrived(self) -> None:
        """Start to copy pinned pages into their blocks, without a wait of the host."""
        copies = self.paged.copies
        for item in self._loading:
            arrived = item.arrived
            if item.problem or item.copied is not None or not isinstance(arrived, LentRange):
                continue
            assert isinstance(copies, CudaCopies)
            tables, first = item.load.block_ids, item.load.start // self._block
            item.check = self.weights_watch.begun
            try:
                item.copied = copies.load(
                    arrived.tensor.view(-1, self.paged.page_bytes),
                    lambda pages, begin, tables=tables, first=first: self.paged.put_pages(
                        tables, pages, first + begin
                    ),
                )
            except Exception as error:
                log.debug("a load failed", exc_info=True)
                item.failure = f"{FAILED}: {type(error).__name__}"
                # Pages that are on their way must not reach the blocks of another request.
                item.copied = copies.load_event()

    def _unsettled(self, item: _PendingLoad, refused: str) -> bool:
        """Tell whether a load that is over has work or a check under way on a GPU."""
        # Even a load that failed: its blocks are still being written to.
        if item.copied is not None and not item.copied.query():
            return True
        if refused or item.problem or isinstance(item.arrived, str) or item.goes_on:
            return False
        # They came a moment ago, and the next step copies them.
        if item.copied is None and isinstance(item.arrived, LentRange):
            return True
        if item.check is None:
            item.check = self.weights_watch.begun
        return not self.weights_watch.passed(item.check)

    def take_news(self) -> tuple[list[tuple[str, str]], dict[str, int], str]:
        """Take the news since the last call.

        Returns
        -------
        fetched : list[tuple[str, str]]
            As `StepReport.fetched`.
        rows : dict[str, int]
            As `StepReport.rows`.
        problem : str
            Why blends must be switched off, or "".
        """
        fetched_marks, self._fetched_marks = self._fetched_marks, []

        problem = ""
        if self.blend_worker is not None:
            problem, self.blend_worker.problem = self.blend_worker.problem, ""

        return (
            fetched_marks,
            {item.load.request_id: self._rows(item) for item in self._loading if item.blend},
            problem,
        )

    def close(self) -> None:
        """End the threads; what they still read is given up."""
        for pool in (self._pool, self._drafting):
            pool.shutdown(wait=False, cancel_futures=True)

    def _rows(self, item: _PendingLoad) -> int:
        """Return the rows of steps left for a blend.

        The rows of the check count too, since without room for them a blend would never begin.
        """
        if item.blend is None or item.problem or self.blend_runner is None:
            return 0
        return item.blend.remaining_rows + self.blend_runner.rows_checked(item.blend)

    def _wait(self) -> None:
        """Leave the interpreter to the readers for a moment, to those of other ranks too."""
        reading = [
            item.fetched
            for item in self._loading
            if item.fetched is not None and not item.fetched.done()
        ]
        if reading:
            wait(reading, IDLE_WAIT_S, FIRST_COMPLETED)
        else:
            time.sleep(IDLE_WAIT_S)

    def _late(self, item: _PendingLoad) -> bool:
        """Tell whether a load's data should be there by now.

        A load that waits for a thread is late if its threads have taken up no load for as long.
        """
        if item.fetched is None or item.fetched.done():
            return False

        waits = max(item.ordered, self._taken_up.get(bool(item.load.blend_ids), 0.0))
        return time.monotonic() >= (
            item.until or (waits if item.begun is None else item.begun) + self.timeout_s
        )

    def _begin(self) -> None:
        """Hand loads to the threads, in order, as memory allows.

        No draft overtakes another, or a large draft might never begin. Drafts are made one at a
        time, since they take time from the engine loop.
        """
        draft_bytes = sum(
            self._draft_bytes(item.load) for item in self._loading if item.fetched is not None
        )
        full = False
        for item in self._loading:
            if item.fetched is not None:
                continue
            item_bytes = self._draft_bytes(item.load)
            # Once a draft did not fit, those behind it wait too, whatever their size.
            full = full or (item_bytes > 0 and draft_bytes + item_bytes > self.max_draft_bytes)
            if not item_bytes or not full:
                draft_bytes += item_bytes
                item.fetched = (self._drafting if item_bytes else self._pool).submit(
                    self._fetch, item
                )

    def _draft_bytes(self, load: LoadOrder) -> int:
        return len(load.blend_ids) * self.paged.bytes_per_token

    def _fetch(self, item: _PendingLoad) -> _Fetched:
        """Read the needed part of a state, or draft a blend, in a thread.

        Returns the reason if neither is possible.
        """
        load = item.load
        now = item.begun = self._taken_up[bool(load.blend_ids)] = time.monotonic()
        item.until = now + min(load.read_limit_s, self.timeout_s) if load.read_limit_s else None
        if load.blend_ids:
            return self._make_draft(load, item.until)

        # Pages are put in whole, from the block that holds the first token.
        first = load.start - load.start % self._block
        parts = self._read(load.donors[0], [(first, load.stop)], item.until)
        if isinstance(parts, str):
            return parts

        state = joined(parts, first, load.stop)
        if state is None:
            return SHORT
        if load.snapshot:
            recurrent = self._read_snapshot(load.snapshot, item.until)
            if isinstance(recurrent, str):
                return recurrent
            item.state = recurrent
        return self._pin(tensor_view(state)[0, 0, 0], item.until)

    def _read_snapshot(self, id: str, until: float | None) -> torch.Tensor | str:
        """Read recurrent state `[bytes]`, in a thread, and verify it; return why that failed."""
        try:
            stored = self.store.get(id, until)
        except Exception as error:
            log.debug("a store failed", exc_info=True)
            return f"{STORE_FAILED}: {type(error).__name__}"
        if stored is None:
            return unread_reason(until, GONE)
        states, tensor = self.paged.states, stored.tensor
        expected = (SNAPSHOT, "U8", () if states is None else (states.nbytes,))
        if (stored.meta.kind, tensor.dtype, tensor.shape) != expected:
            return "the recurrent state has another shape than this model's"
        return tensor_view(tensor)

    def _pin(self, pages: torch.Tensor, until: float | None) -> torch.Tensor | LentRange:
        """Copy pages to pinned memory, in a thread; return them as they are where there is none."""
        copies = self.paged.copies
        if not isinstance(copies, CudaCopies) or not copies.can_load(self.paged.page_bytes):
            return pages
        # Not for long: saves keep theirs until a slow store has taken them.
        wait_s = PIN_WAIT_S if until is None else min(PIN_WAIT_S, until - time.monotonic())
        return copies.pin([pages], wait_s) or pages

    @property
    def _block(self) -> int:
        return self.paged.block_tokens

    def _read(self, id: str, rows: Rows | None = None, until: float | None = None) -> Parts | str:
        """Read parts that hold at least these rows (None: all), in a thread, and verify them.

        Returns the reason if the state is not there or is of another model.
        """
        # A store never raises on reading; one that does anyway costs a miss.
        try:
            parts = self.store.get_parts(id, rows, until)
        except Exception as error:
            log.debug("a store failed", exc_info=True)
            return f"{STORE_FAILED}: {type(error).__name__}"

        if not parts:
            return unread_reason(until, GONE)
        for part in parts:
            tokens, pages = part.stop - part.first, part.meta.kind == KV
            # State of another model or layout would be put in without an error.
            shape = (
                (1, 1, 1, *self.paged.pages_shape(tokens)) if pages else self.paged.shape(tokens)
            )
            if (part.tensor.shape, part.tensor.page) != (shape, self._block if pages else 1):
                return "the donor's state has another shape than this model's"
            if part.tensor.dtype != ("U8" if pages else DTYPE_NAMES.get(self.paged.dtype)):
                return "the donor's state has another dtype"
        return parts

    def _make_draft(self, load: LoadOrder, until: float | None) -> BlendState | str:
        """Make the draft of a blend, in a thread, or return the reason if that is not possible."""
        if self.blend_runner is None:
            return "blend is not possible in this worker"
        # Looked up again: a donor may have been evicted since the plan.
        donor_metas = [(id, self.store.meta(id)) for id in load.donors]
        missing_reasons = (GONE,) * sum(meta is None for _, meta in donor_metas)
        metas = [meta for _, meta in donor_metas if meta is not None]

        try:
            read = partial(self._read, until=until)

            draft = self.blend_runner.draft(
                load.blend_ids, load.start, load.stop, metas, read, self.buffers, missing_reasons
            )
            # Blends are refused with more than one KV cache group, so the first has all layers.
            return BlendState(draft, load.block_ids[0])
        except InputError as error:
            return str(error)
        except Exception as error:
            log.debug("a blend failed", exc_info=True)
            return f"{DRAFT_FAILED}: {type(error).__name__}"

    def _mix(self, plan: StepPlan, refused: str) -> None:
        """Begin blends that may begin, and compute rows, in the engine loop."""
        if self.blend_worker is None:
            return

        mixing: list[BlendState] = []
        for item in self._loading:
            name, blend = item.load.request_id, item.blend
            item.failure = item.failure or plan.drop.get(name, "")
            if blend is None or item.problem:
                continue

            # Over for all ranks: only its check is awaited.
            if item.check is not None:
                continue
            # Several ranks begin in the step that the scheduler names, a single one at once.
            item.may_begin = item.may_begin or not self._in_lockstep or name in plan.begin
            if item.may_begin:
                mixing.append(blend)
            elif not item.reported and not refused:
                item.reported = True
                self._fetched_marks.append((name, blend.draft.mark))

        self.blend_worker.mix(mixing, plan.room, refused)

    def _put_in(self, item: _PendingLoad, refused: str) -> LoadResult:
        """Finish a load: put exact state into its blocks, or report the end of a blend.

        A problem is reported and not raised.
        """
        load = item.load
        # Cancelled before a thread took it up: no thread holds a part of it.
        if item.fetched is None or item.fetched.cancel():
            item.fetched = None
        arrived = item.arrived
        late_reason = (
            (LATE if item.until else f"{SLOW}: {self.timeout_s:g} s") if item.goes_on else ""
        )
        # It came after the decision to give it up: nothing has copied it.
        if not late_reason and isinstance(arrived, LentRange) and item.copied is None:
            late_reason = LATE
        problem = (
            refused or item.problem or late_reason or (arrived if isinstance(arrived, str) else "")
        )

        if not problem:
            # A load that fails costs time, never the engine: vLLM computes its blocks.
            try:
                if isinstance(arrived, torch.Tensor):
                    self.paged.put_pages(load.block_ids, arrived, load.start // self._block)
                if item.state is not None and self.paged.states is not None:
                    last_block = (load.stop - 1) // self._block
                    self.paged.states.put(load.block_ids, last_block, item.state)
            except Exception as error:
                log.debug("a load failed", exc_info=True)
                problem = f"{FAILED}: {type(error).__name__}"

        if problem:
            # The other ranks wait for an answer: an empty mark drops the blend for all.
            if load.blend_ids and not item.reported and self._in_lockstep:
                self._fetched_marks.append((load.request_id, ""))
            return LoadResult(load.request_id, 0, 0.0, problem=problem)

        seconds = time.monotonic() - item.ordered
        if not isinstance(arrived, BlendState):
            nbytes = load.tokens * self.paged.bytes_per_token
            nbytes += 0 if item.state is None else len(item.state)
            unpinned = not (self.paged.copies.is_host or isinstance(arrived, LentRange))
            return LoadResult(
                load.request_id, nbytes, seconds, donors=load.donors, unpinned=unpinned
            )

        draft = arrived.draft
        # Its rows are in the blocks, so the next draft may have the memory.
        if draft.buffer is not None:
            self.buffers.take_back(draft.buffer)

        log.debug(
            "request %s: blended from %d donors, %s first",
            load.request_id,
            len(draft.donors),
            draft.donors[0],
        )
        for why in draft.left_out:
            log.warning("a donor was left out of the blend of request %s: %s", load.request_id, why)

        nbytes = (draft.plan.end - load.start) * self.paged.bytes_per_token
        return LoadResult(
            load.request_id,
            nbytes,
            seconds,
            arrived.computed,
            "",
            draft.donors,
            draft.left_out,
            arrived.blended_rows,
            draft.unpinned,
        )

    @property
    def _in_lockstep(self) -> bool:
        """Whether other ranks wait for this rank's answer about a blend."""
        return self.blend_worker is not None and self.blend_worker.blend_runner.lockstep.ranks > 1
