"""Shares of each step for vLLM, loads and blends, and the decision whether a load pays.

vLLM computes prompts first come, first served, within a budget of tokens for each step. The budget
does not count the tokens that a blend recomputes: to vLLM the request waits for remote KV, and the
last tokens of its prompt can only be computed in the step after. So a step is cut in two. After a
step in which state arrives comes a short step, for what vLLM computes behind that state, and both
together have the budget of one step. The short step comes too where vLLM had budget left in a step,
and other requests came during it or could not be begun, if the load saves more than the short step
costs. vLLM's budget is lowered by what it leaves to blends and to the short step
(`upstream.leave_room`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TOKENS_A_ROW = 20
"""Prompt tokens of a blend for each further token of the budget.

Reading donors, moving keys and writing blocks take as long as recomputing one token of 20 on
SmolLM2, of 4 on docs-lm."""

CUT = 256
"""Tokens that a short step costs beside its own, an eighth of the budget at most.

A GPU takes about as long for fewer tokens."""

Stage = Literal["waits", "loads", "due", "runs"]


class WaitingBlend(NamedTuple):
    """A request before its first token.

    Attributes
    ----------
    request_id : str
        vLLM's id.
    tokens : int
        Tokens of its prompt that vLLM has to compute as things are.
    stage : Stage
        `waits`; `loads`: its state was promised and is not there; `due`: the state is there;
        `runs`: vLLM has begun to compute the prompt.
    rows : int or None
        Tokens that its blend has yet to recompute, 0 for an exact load; None without a load.
    last : int
        Tokens that vLLM computes behind what is loaded.
    saved : int
        Tokens that nobody computes, once its state is there.
    """

    request_id: str
    tokens: int
    stage: Stage = "waits"
    rows: int | None = None
    last: int = 0
    saved: int = 0


class StepRoom(NamedTuple):
    """Part of a step left free.

    Attributes
    ----------
    tokens : int
        Tokens of vLLM's budget.
    longest : int
        Maximum tokens of one prompt in the step; 0 for any number.
    """

    tokens: int = 0
    longest: int = 0


@dataclass
class BlendQueue:
    """Shares out steps between vLLM, loads and blends. For the engine loop alone.

    Requests are compared with the queue of a server without loads, which would have `lead` tokens
    more to compute. A load's deadline is the step in which that server would have computed its
    prompt.

    Attributes
    ----------
    budget : int
        Tokens of a step.
    reserved : int
        Tokens of the step kept for a short step behind it.
    """

    budget: int
    reserved: int = 0
    _saved: int = 0
    _rows: int = 0
    _queued_tokens: int = 0
    _step_tokens: int = 1
    _vllm_budget: int = 0
    _full: bool = False
    _short_tokens: int | None = None
    _planned: dict[str, tuple[WaitingBlend, int, int]] = field(
        default_factory=dict[str, tuple[WaitingBlend, int, int]]
    )

    @property
    def lead(self) -> int:
        """Number of tokens that a server without loads would have to compute in addition."""
        return max(0, self._saved - self._rows)

    def share_out(self, queue: Sequence[WaitingBlend], decoding: int = 0) -> StepRoom:
        """Share out the next step.

        Parameters
        ----------
        queue : Sequence[WaitingBlend]
            Requests before their first token, in arrival order.
        decoding : int
            Tokens of the step that requests behind their first token take.

        Examples
        --------
        >>> queue = BlendQueue(100)
        >>> queue.share_out(
        ...     [
        ...         WaitingBlend("a", 50),
        ...         WaitingBlend("b", 0, "loads", 20, 4),
        ...         WaitingBlend("c", 160),
        ...     ]
        ... )
        StepRoom(tokens=40, longest=0)
        >>> queue.share_out([WaitingBlend("b", 4, "due"), WaitingBlend("c", 150, "runs")])
        StepRoom(tokens=92, longest=4)
        """
        earlier, self.reserved, self._short_tokens = self.reserved, 0, None

        # At least 1, because tokens are divided by it.
        remaining = self._step_tokens = max(1, self.budget - decoding)
        self._rows = sum(waiting.rows or 0 for waiting in queue if waiting.stage == "loads")
        self._queued_tokens = sum(
            (waiting.rows or 0) + waiting.last if waiting.stage == "loads" else waiting.tokens
            for waiting in queue
        )
        self._planned, ahead, lead, blend_rows, max_tokens = {}, 0, self.lead, 0, 0

        # First come, first served: each one gets what those before it leave.
        for waiting in queue:
            rows, free, loads = waiting.rows or 0, remaining, waiting.stage == "loads"
            share = min(waiting.tokens, remaining)

            if waiting.rows is not None and waiting.stage == "waits":
                self._planned[waiting.request_id] = waiting, ahead, lead
                loads = self._pays(waiting, ahead, lead)
                lead += self._gain(waiting) - self._cost if loads else 0
                # vLLM gets to it while a token of its budget is left.
                free = max(0, remaining - 1)

            if loads:
                behind = (
                    waiting.last
                    + max(0, waiting.last - max_tokens)
                    + (0 if self.reserved else self._cost + decoding)
                )
                # With a short step kept already, a single row is enough to begin.
                min_free = behind + (1 if self.reserved else rows)
                if self._crowded and (rows or waiting.stage == "waits") and min_free <= free:
                    self.reserved += behind
                    max_tokens = max(max_tokens, waiting.last)
                    free, remaining = free - behind, remaining - behind

                share = min(rows, free)
                blend_rows += share

            ahead += rows + waiting.last if loads else waiting.tokens
            remaining -= share

        # Longest first, so that one short step serves as many arrived loads as it can.
        due = sorted((waiting.tokens for waiting in queue if waiting.stage == "due"), reverse=True)
        begun = [waiting.tokens for waiting in queue if waiting.stage in ("due", "runs")]

        for longest in due if self._queued_tokens > sum(due) else ():
            short = decoding + sum(min(tokens, longest) for tokens in begun)
            saved = sum(
                waiting.saved
                for waiting in queue
                if waiting.stage == "due" and waiting.tokens <= longest
            )
            # Either room was kept for it, or the load saves more than a short step costs.
            if short <= earlier or (not self._full and short + self._cut <= saved):
                self.reserved, self._short_tokens, self._vllm_budget = 0, earlier, short
                return StepRoom(self.budget - short, longest)

        max_tokens = max(0, self.budget - decoding)
        room = min(blend_rows + self.reserved, max_tokens)
        remaining, self._vllm_budget = max_tokens - room, self.budget - room
        # vLLM schedules running requests first, so a limit for each prompt leaves room to due ones.
        return StepRoom(room, max(1, remaining - sum(due), remaining // 2) if due else 0)

    def pays(self, request_id: str, rows: int, last: int) -> bool | None:
        """Tell whether to begin a load in the step that was shared out.

        A blend pays if neither its own first token nor another request's comes later than with full
        computation. An exact load pays if it saves more than it costs the others.

        Parameters
        ----------
        request_id : str
            A request of the queue.
        rows : int
            Tokens that a blend recomputes; 0 for an exact load.
        last : int
            Tokens that vLLM computes behind what is loaded.

        Returns
        -------
        bool or None
            None for a request outside of the queue.
        """
        if request_id not in self._planned:
            return None
        waiting, ahead, lead = self._planned[request_id]
        return self._pays(waiting._replace(rows=rows, last=last), ahead, lead)

    def promised(self, tokens: int, rows: int) -> None:
        """Note a promised load of `tokens` tokens, of which a blend recomputes `rows`."""
        self._saved += tokens
        self._rows += rows

    def failed(self, tokens: int) -> None:
        """Note tokens that are not saved.

        Their load failed, or a server without loads need not compute them either.
        """
        self._saved = max(0, self._saved - tokens)

    def stepped(self, scheduled: int) -> int:
        """Note the tokens that vLLM computes in the step.

        A server without loads would have used all of the budget. In a short step it would only
        compute what was not kept free before.

        Returns
        -------
        int
            Rows that blends may compute in the same step.
        """
        self._full = scheduled >= self._vllm_budget

        if self._short_tokens is None:
            self._saved = max(0, self._saved - (self.budget - scheduled))
            return max(0, self.budget - scheduled - self.reserved)
        self._saved = max(
            0,
            self._saved
            + scheduled
            - (self.budget - self._step_tokens)
            - max(0, scheduled + self._cut - self._short_tokens),
        )
        return 0

    @property
    def _crowded(self) -> bool:
        """Whether there is more to compute than a step holds."""
        return self._queued_tokens > self._step_tokens

    @property
    def _cut(self) -> int:
        """Tokens that a short step costs."""
        return min(CUT, self.budget // 8)

    @property
    def _cost(self) -> int:
        """Tokens that a short step is expected to cost."""
        return self._cut if self._crowded else 0

    def _pays(self, waiting: WaitingBlend, ahead: int, lead: int) -> bool:
        """Decide as `pays` for a request with `ahead` tokens to compute before it.

        Steps are compared by the tokens in them, since the last ones have fewer.
        """
        gain = self._gain(waiting)
        if gain < self._cost or not waiting.rows:
            return gain >= self._cost

        blended = self._steps(ahead + (waiting.rows or 0) + 2 * waiting.last + self._cost + 1)
        # When a server without loads would have computed this prompt.
        deadline = self._steps(ahead + lead + waiting.tokens)

        return min(blended * self._step_tokens, self._queued_tokens - gain) <= min(
            deadline * self._step_tokens, self._queued_tokens + lead
        )

    def _gain(self, waiting: WaitingBlend) -> int:
        return max(0, waiting.tokens - (waiting.rows or 0) - waiting.last)

    def _steps(self, tokens: int) -> int:
        return -(-tokens // self._step_tokens)
