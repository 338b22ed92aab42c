"""The share of a step that blends get: queues of random prompts through vLLM's rule and the worker's, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.engines.vllm.blend.queue import Queue, Waiting

TAIL = 16
"""Tokens of a blend that vLLM computes."""


class Prompt(NamedTuple):
    """What comes to a server.

    rows     what a blend of it recomputes; None: it cannot be blended
    surplus  by how much the scheduler's estimate of these is too high
    late     steps until its donors are read
    held     tokens in vLLM's prefix cache, which is looked up when its turn comes
    """

    tokens: int
    rows: int | None = None
    surplus: int = 0
    late: int = 0
    held: int = 0


@dataclass
class Live:
    """A request of the server. `blend`: what of `prompt.rows` is still to come; None: it is not blended (any more)."""

    name: str
    prompt: Prompt
    tokens: int
    blend: int | None
    late: int
    held: int
    blending: bool = False

    @property
    def waiting(self) -> Waiting:
        if self.blending:
            return Waiting(self.name, 0, 0 if self.late else self.blend, blending=True)
        return Waiting(self.name, self.tokens, None if self.blend is None else self.blend + self.prompt.surplus)


class Server:
    """Prompts that came at once.

    done     how much was computed until the first token of each, which stands for time
    steps    tokens of each step
    idle     tokens that were kept free for blends and not used
    blended  prompts that were blended
    """

    def __init__(self, prompts: Sequence[Prompt], budget: int, *, blends: bool = True) -> None:
        self.queue, self.budget = Queue(budget, TAIL), budget
        self.done, self.steps, self.idle, self.blended = dict[str, int](), list[int](), 0, list[Prompt]()
        self.live = [
            Live(str(number), each, each.tokens, each.rows if blends else None, each.late, each.held)
            for number, each in enumerate(prompts)
        ]
        while self.live:
            self.step()
            assert len(self.steps) < 1000, "somebody waits for ever"

    def step(self) -> None:
        kept = self.queue.share_out([each.waiting for each in self.live])
        assert 0 <= kept <= self.budget
        scheduled = self.scheduled(self.budget - kept)
        self.queue.stepped(self.budget - scheduled)
        recomputed = self.recomputed(self.budget - scheduled)
        self.idle += max(0, kept - recomputed)
        self.steps.append(scheduled + recomputed)
        self.done |= {each.name: sum(self.steps) for each in self.live if not each.tokens}
        self.live = [each for each in self.live if each.tokens]

    def scheduled(self, budget: int) -> int:
        """vLLM's: first come, first served. A blend is promised when its turn comes, or refused."""
        before = budget
        for each in self.live:
            held, each.held = (each.held, 0) if budget else (0, each.held)
            each.tokens -= held
            self.queue.held(held)
            if budget and each.blend is not None and not each.blending:
                if self.queue.pays(each.name, held):
                    self.queue.promised(each.tokens - TAIL, each.blend + each.prompt.surplus)
                    self.blended.append(each.prompt)
                    each.blending = True
                else:
                    each.blend = None
            if not each.blending:
                taken = min(each.tokens, budget)
                each.tokens, budget = each.tokens - taken, budget - taken
        return before - budget

    def recomputed(self, room: int) -> int:
        """The worker's: what the step has left is for blends whose donors are read, in the order of their promise."""
        before = room
        for each in self.live:
            if each.blending and not each.late:
                taken = min(each.blend or 0, room)
                each.blend, room = (each.blend or 0) - taken, room - taken
                if not each.blend:
                    each.tokens, each.blend, each.blending = TAIL, None, False
            each.late -= each.blending and each.late > 0
        return before - room


@st.composite
def queues(draw: st.DrawFn, latest: int = 0, most_held: int = 0) -> tuple[list[Prompt], int]:
    prompts: list[Prompt] = []
    for _ in range(draw(st.integers(1, 12))):
        tokens, held = draw(st.integers(TAIL + 1, 600)), draw(st.just(0) | st.integers(0, most_held))
        rows = draw(st.none() | st.integers(1, tokens - TAIL))
        surplus = 0 if rows is None else draw(st.integers(0, tokens - TAIL - rows))
        prompts.append(Prompt(held + tokens, rows, surplus, draw(st.integers(0, latest)), held))
    return prompts, draw(st.integers(TAIL, 900))


@given(queues())
def test_no_first_token_is_later_than_without_blends(queue: tuple[list[Prompt], int]) -> None:
    """Neither of blends nor of the prompts beside them; a step computes no more than its budget."""
    server, without = Server(*queue), Server(*queue, blends=False)
    assert {name: time - without.done[name] for name, time in server.done.items() if time > without.done[name]} == {}
    assert max(server.steps) <= queue[1]


@given(queues(most_held=600))
def test_what_vllm_holds_of_prompts_ahead_makes_a_step_at_most(queue: tuple[list[Prompt], int]) -> None:
    """That is not known before their turn, when the step was shared out."""
    server, without = Server(*queue), Server(*queue, blends=False)
    assert {name: time for name, time in server.done.items() if time > without.done[name] + queue[1]} == {}
    assert max(server.steps) <= queue[1]


@given(queues(latest=20))
def test_donors_that_are_read_slowly_hold_nobody_up(queue: tuple[list[Prompt], int]) -> None:
    """Budget is kept free for a blend in the step that begins it, and then not before its donors are read."""
    server = Server(*queue)
    assert server.idle <= sum((each.rows or 0) + each.surplus for each in server.blended)
    assert len(server.done) == len(queue[0])


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=12), st.integers(1, 400), st.integers(0, 20))
def test_blends_under_way_take_their_tokens_in_arrival_order(
    sizes: list[tuple[int, bool]], budget: int, decoding: int
) -> None:
    """As prompts do: what is before them first."""
    queue = [
        Waiting(str(number), 0 if blend else size, size if blend else None, blend)
        for number, (size, blend) in enumerate(sizes)
    ]
    left, wanted = max(0, budget - decoding), 0
    for size, blend in sizes:
        wanted += min(size, left) if blend else 0
        left -= min(size, left)
    assert Queue(budget).share_out(queue, decoding) == wanted


def refused(prompts: Sequence[Prompt], budget: int) -> list[int]:
    server = Server(prompts, budget)
    return [number for number, each in enumerate(prompts) if each.rows is not None and each not in server.blended]


def blends(*rows: int | None) -> list[Prompt]:
    """Prompts of 700 tokens, told apart by a token."""
    return [Prompt(700 + number, each) for number, each in enumerate(rows)]


@pytest.mark.parametrize(("behind", "expected"), [(0, []), (1, []), (2, [0])])
def test_a_blend_is_refused_where_others_fill_the_step_that_it_needs_more(behind: int, expected: list[int]) -> None:
    """Computed in full, the first prompt is done in the first step."""
    assert refused(blends(200, *[None] * behind), 1000) == expected


def test_what_blends_saved_pays_for_the_step_that_the_next_ones_need_more() -> None:
    """The first prompts are done in the first step. Among others it takes a few blends to save a step."""
    assert refused(blends(*[200] * 40), 2048) == [0, 1]
    assert refused(blends(*[200, None, None, None, None] * 8), 1500) == [0, 5]


def test_a_prompt_that_vllm_holds_most_of_is_not_blended() -> None:
    """Full computation is cheaper than it was planned with."""
    queue = Queue(1000, TAIL)
    queue.share_out([Waiting("a", 900), Waiting("b", 700, 90), Waiting("c", 5000)])
    assert (queue.pays("b", 0), queue.pays("b", 600)) == (True, False)


def test_a_blend_that_was_looked_up_since_is_not_decided() -> None:
    queue = Queue(1000, TAIL)
    queue.share_out([Waiting("a", 700)])
    assert queue.pays("a", 0) is None
    assert queue.pays("b", 0) is None


def test_the_lead_is_what_blends_saved_and_steps_did_not_leave() -> None:
    """A blend that failed, or whose client left, saves nothing."""
    queue = Queue(1000, TAIL)
    queue.promised(684, 200)
    assert queue.lead == 484
    queue.stepped(300)  # 200 of them for the blend
    queue.share_out([])
    assert queue.lead == 384
    queue.promised(684, 200)
    queue.failed(684)
    queue.share_out([])
    assert queue.lead == 384
    queue.stepped(1000)
    assert queue.lead == 0
