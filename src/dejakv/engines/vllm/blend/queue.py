"""The queue of prompts in arrival order: which share of a step loads and blends get, and whether one is worth starting.

vLLM computes prompts first come, first served, within a budget of tokens per step. It does not count the tokens that a blend recomputes: to
vLLM its request waits for remote KV, and the last tokens of its prompt can only be computed in the step after. So a step is cut in two:
after one in which state arrives comes a short one, for what vLLM computes behind that state. Both together have the budget of one step.
Where vLLM had budget left in a step, and others came during it or could not be begun, the short one comes too, if the load saves more than
that costs.
vLLM's budget is lowered by what it leaves to blends and to the short step (`upstream.leave_room`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TOKENS_A_ROW = 20
"""Prompt tokens of a blend for each further token of the budget: reading donors, moving keys and writing blocks take as long as
recomputing one token of 20 on SmolLM2, of 4 on docs-lm."""

CUT = 256
"""Tokens that a short step costs beside its own, an eighth of the budget at most: a GPU takes about as long for fewer."""

Stage = Literal["waits", "loads", "due", "runs"]


class WaitingBlend(NamedTuple):
    """A request before its first token.

    tokens  of its prompt that vLLM has to compute as things are
    stage   `waits`; `loads`: its state was promised and is not there; `due`: it is there; `runs`: vLLM has begun to compute it
    rows    tokens that its blend recomputes, those to come, 0 of an exact load; None: there is nothing to load
    last    tokens that vLLM computes behind what is loaded
    saved   tokens that nobody computes, once its state is there
    """

    request_id: str
    tokens: int
    stage: Stage = "waits"
    rows: int | None = None
    last: int = 0
    saved: int = 0


class StepRoom(NamedTuple):
    """Part of a step left free.

    tokens   of vLLM's budget
    longest  maximum tokens of one prompt in the step; 0: any number
    """

    tokens: int = 0
    longest: int = 0


@dataclass
class BlendQueue:
    """Shares out steps between vLLM, loads and blends. For the engine loop alone.

    It compares itself with the queue of a server without loads, which would have `lead` tokens more to compute. A load's deadline is the
    step in which that server would have computed its prompt.

    budget    tokens of a step
    reserved  tokens of the step kept for a short one behind it
    """

    budget: int
    reserved: int = 0
    _saved: int = 0
    _rows: int = 0
    _left: int = 0
    _step: int = 1
    _given: int = 0
    _full: bool = False
    _short: int | None = None
    _planned: dict[str, tuple[WaitingBlend, int, int]] = field(default_factory=dict[str, tuple[WaitingBlend, int, int]])

    @property
    def lead(self) -> int:
        """Tokens to compute less than without loads."""
        return max(0, self._saved - self._rows)

    def share_out(self, queue: Sequence[WaitingBlend], decoding: int = 0) -> StepRoom:
        """Share out the next step.

        queue     in arrival order
        decoding  requests that take one token of the step each

        >>> queue = BlendQueue(100)
        >>> queue.share_out([WaitingBlend("a", 50), WaitingBlend("b", 0, "loads", 20, 4), WaitingBlend("c", 160)])
        StepRoom(tokens=40, longest=0)
        >>> queue.share_out([WaitingBlend("b", 4, "due"), WaitingBlend("c", 150, "runs")])
        StepRoom(tokens=92, longest=4)
        """
        earlier, self.reserved, self._short = self.reserved, 0, None
        # At least 1, because tokens are divided by it.
        remaining = self._step = max(1, self.budget - decoding)
        self._rows = sum(waiting.rows or 0 for waiting in queue if waiting.stage == "loads")
        self._left = sum(
            (waiting.rows or 0) + waiting.last if waiting.stage == "loads" else waiting.tokens for waiting in queue
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
                free = max(0, remaining - 1)  # vLLM gets to it while a token of its budget is left
            if loads:
                behind = (
                    waiting.last + max(0, waiting.last - max_tokens) + (0 if self.reserved else self._cost + decoding)
                )
                min_free = behind + (1 if self.reserved else rows)
                if self._crowded and (rows or waiting.stage == "waits") and min_free <= free:
                    self.reserved, max_tokens = self.reserved + behind, max(max_tokens, waiting.last)
                    free, remaining = free - behind, remaining - behind
                share = min(rows, free)
                blend_rows += share

            ahead += rows + waiting.last if loads else waiting.tokens
            remaining -= share
        # Longest first, so that one short step serves as many arrived loads as it can.
        due = sorted((waiting.tokens for waiting in queue if waiting.stage == "due"), reverse=True)
        begun = [waiting.tokens for waiting in queue if waiting.stage in ("due", "runs")]

        for longest in due if self._left > sum(due) else ():
            short = decoding + sum(min(tokens, longest) for tokens in begun)
            saved = sum(waiting.saved for waiting in queue if waiting.stage == "due" and waiting.tokens <= longest)
            # Either room was kept for it, or the load saves more than a short step costs.
            if short <= earlier or (not self._full and short + self._cut <= saved):
                self.reserved, self._short, self._given = 0, earlier, short
                return StepRoom(self.budget - short, longest)

        max_tokens = max(0, self.budget - decoding)
        room = min(blend_rows + self.reserved, max_tokens)
        remaining, self._given = max_tokens - room, self.budget - room
        return StepRoom(
            room, max(1, remaining - sum(due), remaining // 2) if due else 0
        )  # in vLLM, what runs comes first

    def pays(self, request_id: str, rows: int, last: int) -> bool | None:
        """Whether to begin a load in the step shared out: a blend if neither its own first token nor another's comes later than computed in
        full; an exact load if it saves more than it costs the others. None for a request outside the queue."""
        if request_id not in self._planned:
            return None
        waiting, ahead, lead = self._planned[request_id]
        return self._pays(waiting._replace(rows=rows, last=last), ahead, lead)

    def promised(self, tokens: int, rows: int) -> None:
        """Note a promised load of `tokens` tokens, of which a blend recomputes `rows`."""
        self._saved += tokens
        self._rows += rows

    def failed(self, tokens: int) -> None:
        """Note tokens that are not saved: their load failed, or a server without loads need not compute them either."""
        self._saved = max(0, self._saved - tokens)

    def stepped(self, scheduled: int) -> int:
        """Note the tokens that vLLM computes in the step; return the rows that blends may compute beside them.

        A server without loads would have used all of the budget; in a short step it only computes what was not kept free before.
        """
        self._full = scheduled >= self._given
        if self._short is None:
            self._saved = max(0, self._saved - (self.budget - scheduled))
            return max(0, self.budget - scheduled - self.reserved)
        self._saved = max(
            0, self._saved + scheduled - (self.budget - self._step) - max(0, scheduled + self._cut - self._short)
        )
        return 0

    @property
    def _crowded(self) -> bool:
        """Whether there is more to compute than a step holds."""
        return self._left > self._step

    @property
    def _cut(self) -> int:
        """What a short step costs, in tokens."""
        return min(CUT, self.budget // 8)

    @property
    def _cost(self) -> int:
        """What one is expected to cost."""
        return self._cut if self._crowded else 0

    def _pays(self, waiting: WaitingBlend, ahead: int, lead: int) -> bool:
        """`ahead`: tokens that are computed before it. Steps are compared by the tokens in them, since the last ones have fewer."""
        gain = self._gain(waiting)
        if gain < self._cost or not waiting.rows:
            return gain >= self._cost
        blended = self._steps(ahead + (waiting.rows or 0) + 2 * waiting.last + self._cost + 1)
        # When a server without loads would have computed this prompt.
        deadline = self._steps(ahead + lead + waiting.tokens)
        return min(blended * self._step, self._left - gain) <= min(deadline * self._step, self._left + lead)

    def _gain(self, waiting: WaitingBlend) -> int:
        return max(0, waiting.tokens - (waiting.rows or 0) - waiting.last)

    def _steps(self, tokens: int) -> int:
        return -(-tokens // self._step)
