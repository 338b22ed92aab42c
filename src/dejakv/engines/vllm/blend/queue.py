"""The queue of prompts in arrival order: which share of a step blends get, and whether a blend is worth starting.

vLLM computes prompts first come, first served, within a budget of tokens per step. It does not count the tokens that a blend recomputes: to
vLLM its request waits for remote KV. They get their share here by the same rule, and vLLM's budget is lowered by it
(`upstream.leave_room`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TOKENS_A_ROW = 20
"""A blend takes one token of the budget more for so many of its prompt. Reading donors, moving keys and writing blocks take time too: as long
as recomputing one token for every 20 on SmolLM2, for every 4 on docs-lm."""


class Waiting(NamedTuple):
    """A request before its first token.

    tokens    of its prompt that vLLM has to compute
    rows      tokens that its blend recomputes, those to come; None: no blend
    blending  the blend was promised, and vLLM computes nothing of the prompt until it is there
    """

    request_id: str
    tokens: int
    rows: int | None = None
    blending: bool = False


@dataclass
class Queue:
    """Used in the engine loop alone.

    It is compared with the queue of a server without blends, which would have `lead` tokens more to compute. The deadline of a blend is the
    step in which that server would have computed its prompt. A blend needs a step more than its tokens, since vLLM computes the last ones
    when the others are there: the tokens that blends before it saved pay for that.

    budget  tokens of a step
    tail    last tokens of a blended prompt, which vLLM computes
    """

    budget: int
    tail: int = 0
    _saved: int = 0
    _rows: int = 0
    _left: int = 0
    _held: int = 0
    _step: int = 1
    _planned: dict[str, tuple[Waiting, int]] = field(default_factory=dict[str, tuple[Waiting, int]])

    @property
    def lead(self) -> int:
        """How many tokens less than without blends there are to compute."""
        return max(0, self._saved - self._rows)

    def share_out(self, queue: Sequence[Waiting], decoding: int = 0) -> int:
        """Share out the next step; return how many tokens of it are for blends.

        queue     in arrival order
        decoding  requests that take one token of the step each

        >>> Queue(100).share_out([Waiting("a", 60), Waiting("b", 0, 30, blending=True), Waiting("c", 60)])
        30
        """
        left = self._step = max(1, self.budget - decoding)
        self._rows = sum(each.rows or 0 for each in queue if each.blending)
        self._left = sum((each.rows or 0) + self.tail if each.blending else each.tokens for each in queue)
        self._planned, self._held, ahead, lead, kept = {}, 0, 0, self.lead, 0
        for each in queue:
            rows, taken = each.rows or 0, min(each.tokens, left)
            blends = each.blending
            if each.rows is not None and not blends:
                self._planned[each.request_id] = each, ahead + lead
                blends = self._pays(each, ahead, lead)
                lead += self._gain(each) if blends else 0
            if blends:  # vLLM gets to one that is not promised yet while a token of its budget is left
                taken = min(rows, left if each.blending else max(0, left - 1))
                kept += taken
            ahead += rows + self.tail if blends else each.tokens
            left -= taken
        return max(0, min(kept, self.budget - decoding))

    def held(self, tokens: int) -> None:
        """A prompt that vLLM got to in this step has so many tokens in its prefix cache."""
        self._held += tokens

    def pays(self, request_id: str, held: int) -> bool | None:
        """Whether a blend is to begin in the step that was shared out: its first token is no later than computed in full. None if it
        was not in the queue.

        held  tokens of its prompt in vLLM's prefix cache
        """
        if request_id not in self._planned:
            return None
        each, position = self._planned[request_id]
        ahead = position - (self._held - held) - self.lead
        return self._pays(each._replace(tokens=each.tokens - held), ahead, self.lead)

    def promised(self, tokens: int, rows: int) -> None:
        """A blend of so many tokens was promised, which vLLM does not compute, and of which it recomputes `rows`."""
        self._saved += tokens
        self._rows += rows

    def failed(self, tokens: int) -> None:
        """So many tokens are not saved: their blend failed, or a server without blends need not compute them either."""
        self._saved = max(0, self._saved - tokens)

    def stepped(self, room: int) -> None:
        """In a step vLLM left so many tokens of the budget, which a server without blends would have used."""
        self._saved = max(0, self._saved - room)

    def _pays(self, each: Waiting, ahead: int, lead: int) -> bool:
        """`ahead`: tokens that are computed before it. Steps are compared by the tokens in them, since the last ones have fewer."""
        blended = 1 + self._steps(ahead + (each.rows or 0) + 1)
        deadline = self._steps(ahead + lead + each.tokens)
        left = self._left - self._held
        return min(blended * self._step, left - self._gain(each)) <= min(deadline * self._step, left + lead)

    def _gain(self, each: Waiting) -> int:
        return max(0, each.tokens - (each.rows or 0) - self.tail)

    def _steps(self, tokens: int) -> int:
        return -(-tokens // self._step)
