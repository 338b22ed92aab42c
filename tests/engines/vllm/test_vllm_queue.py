"""The share of a step that loads and blends get: queues of random prompts through vLLM's rule and the worker's, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.engines.vllm.blend.queue import CUT, BlendQueue, Stage, StepRoom, WaitingBlend

TAIL = 16
"""Tokens of a blend that vLLM computes."""


class Prompt(NamedTuple):
    """What comes to a server.

    rows     what a blend of it recomputes, 0 of an exact load; None: nothing can be loaded
    surplus  by how much the scheduler's estimate of these is too high
    late     steps until its donors are read
    last     tokens behind what is loaded
    comes    when, in tokens of steps
    """

    tokens: int
    rows: int | None = None
    surplus: int = 0
    late: int = 0
    last: int = TAIL
    comes: int = 0


@dataclass
class Live:
    """A request of the server. `rows`: what of `prompt.rows` is still to come; None: nothing is loaded (any more)."""

    name: str
    prompt: Prompt
    tokens: int
    rows: int | None
    late: int
    stage: Stage = "waits"

    @property
    def waiting(self) -> WaitingBlend:
        if self.stage == "loads":
            return WaitingBlend(self.name, 0, "loads", 0 if self.late else self.rows, self.prompt.last)
        rows = None if self.rows is None else self.rows + self.prompt.surplus
        saved = self.prompt.tokens - self.tokens - (self.prompt.rows or 0) if self.stage == "due" else 0
        return WaitingBlend(self.name, self.tokens, self.stage, rows, self.prompt.last, saved)


class Server:
    """Prompts in the order in which they come.

    done    tokens of all steps until the first token of each, which stands for time; a short step takes as long as `CUT` at least
    steps   tokens of each step
    idle    tokens that were kept free for loads and not used
    loaded  prompts that were loaded or blended
    """

    def __init__(self, prompts: Sequence[Prompt], budget: int, *, loads: bool = True) -> None:
        self.queue, self.budget, self.time = BlendQueue(budget), budget, 0
        self.done, self.steps, self.idle, self.loaded = dict[str, int](), list[int](), 0, list[Prompt]()
        self.live = list[Live]()
        self.to_come = [
            Live(str(number), each, each.tokens, each.rows if loads else None, each.late)
            for number, each in enumerate(prompts)
        ]
        while self.live or self.to_come:
            if not self.live:
                self.time = max(self.time, self.to_come[0].prompt.comes)
            while self.to_come and self.to_come[0].prompt.comes <= self.time:
                self.live.append(self.to_come.pop(0))
            self.step()
            assert len(self.steps) < 1000, "somebody waits for ever"

    def step(self) -> None:
        room = self.queue.share_out([each.waiting for each in self.live])
        assert 0 <= room.tokens <= self.budget
        scheduled = self.scheduled(self.budget - room.tokens, room.longest or self.budget)
        left = self.queue.stepped(scheduled)
        recomputed = self.recomputed(left)
        self.idle += max(0, min(left, room.tokens) - recomputed)
        self.steps.append(scheduled + recomputed)
        answered = [each.name for each in self.live if each.stage != "loads" and not each.tokens]
        short = bool(room.longest) and len(answered) < len(self.live)
        self.time += max(scheduled + recomputed, min(CUT, self.budget // 8) * short)
        self.done |= dict.fromkeys(answered, self.time)
        self.live = [each for each in self.live if each.name not in self.done]

    def scheduled(self, budget: int, longest: int) -> int:
        """vLLM's: what it has begun, what is loaded, and the others as they came. A load is promised when its turn comes, or refused."""
        before, order = budget, ("runs", "due", "waits")
        for each in sorted((one for one in self.live if one.stage in order), key=lambda one: order.index(one.stage)):
            if not budget:
                break
            if each.rows is not None:
                if self.queue.pays(each.name, each.rows + each.prompt.surplus, each.prompt.last):
                    self.queue.promised(each.tokens - each.prompt.last, each.rows + each.prompt.surplus)
                    self.loaded.append(each.prompt)
                    each.stage = "loads"
                    continue
                each.rows = None
            taken = min(each.tokens, budget, longest)
            each.tokens, budget, each.stage = each.tokens - taken, budget - taken, "runs"
        return before - budget

    def recomputed(self, room: int) -> int:
        """The worker's: what the step has left is for blends whose donors are read, in the order of their promise."""
        before = room
        for each in self.live:
            if each.stage == "loads" and not each.late:
                taken = min(each.rows or 0, room)
                each.rows, room = (each.rows or 0) - taken, room - taken
                if not each.rows:
                    each.tokens, each.rows, each.stage = each.prompt.last, None, "due"
            each.late -= each.stage == "loads" and each.late > 0
        return before - room


@st.composite
def queues(draw: st.DrawFn, latest: int = 0, surpluses: bool = False) -> tuple[list[Prompt], int]:
    """Blends and prompts that share nothing, none longer than a step."""
    prompts, budget = list[Prompt](), draw(st.sampled_from((512, 1024, 2048)))
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(TAIL + 1, budget))
        rows = draw(st.none() | st.integers(1, tokens - TAIL))
        surplus = 0 if rows is None or not surpluses else draw(st.integers(0, tokens - TAIL - rows))
        prompts.append(Prompt(tokens, rows, surplus, draw(st.integers(0, latest))))
    return prompts, budget


def later(queue: tuple[list[Prompt], int], by: int = 0) -> dict[str, int]:
    server, without = Server(*queue), Server(*queue, loads=False)
    assert max(server.steps) <= queue[1]
    return {name: time - without.done[name] for name, time in server.done.items() if time > without.done[name] + by}


@given(queues())
def test_no_first_token_is_later_than_without_blends(queue: tuple[list[Prompt], int]) -> None:
    """Neither of blends nor of the prompts beside them; a step computes no more than its budget."""
    assert later(queue) == {}


@given(queues(), st.integers(2 * TAIL, 1700), st.integers(1, 300))
def test_who_comes_while_a_blend_is_made_keeps_it_waiting_for_a_short_step_alone(
    queue: tuple[list[Prompt], int], saved: int, rows: int
) -> None:
    """None was kept free for it before, and nobody is later than if it had been computed in full."""
    prompts, budget = queue
    saved = min(saved + min(CUT, budget // 8), budget - rows - TAIL)
    behind = [each._replace(rows=None, comes=1) for each in prompts]
    assert later(([Prompt(rows + saved + TAIL, rows), *behind], budget)) == {}


def test_a_short_step_comes_behind_one_in_which_others_could_not_be_begun() -> None:
    """Donors were read longer than the step took for which room was kept, and lookups of others than the next one."""
    queue = BlendQueue(2048)
    first = queue.share_out([WaitingBlend("a", 1599, rows=449, last=TAIL), WaitingBlend("b", 1514, last=1)], 1)
    queue.promised(1583, 449)
    queue.stepped(2048 - first.tokens)
    behind = [WaitingBlend("c", 1514), WaitingBlend("d", 1152)]
    queue.share_out([WaitingBlend("a", 0, "loads", 0, TAIL), WaitingBlend("b", 205, "runs"), *behind], 1)
    queue.stepped(206)
    room = queue.share_out([WaitingBlend("a", TAIL, "due", saved=1273), *behind], 2)
    assert room == StepRoom(2048 - TAIL - 2, TAIL)


@given(queues(surpluses=True))
def test_a_blend_that_recomputes_less_than_was_estimated_makes_a_step_at_most(queue: tuple[list[Prompt], int]) -> None:
    assert later(queue, by=queue[1]) == {}


@given(queues(latest=20, surpluses=True))
def test_donors_that_are_read_slowly_hold_nobody_up(queue: tuple[list[Prompt], int]) -> None:
    """Budget is kept free for a blend in the step that begins it, and then not before its donors are read."""
    server = Server(*queue)
    assert server.idle <= sum((each.rows or 0) + each.surplus + 2 * TAIL + CUT for each in server.loaded)
    assert len(server.done) == len(queue[0])


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=12), st.integers(1, 400), st.integers(0, 20))
def test_blends_under_way_take_their_tokens_in_arrival_order(
    sizes: list[tuple[int, bool]], budget: int, decoding: int
) -> None:
    """As prompts do: what is before them first, and nothing of what a short step behind this one needs."""
    queue = [
        WaitingBlend(str(number), 0, "loads", size) if blend else WaitingBlend(str(number), size)
        for number, (size, blend) in enumerate(sizes)
    ]
    made = BlendQueue(budget)
    room, left, wanted = made.share_out(queue, decoding).tokens, max(0, budget - decoding), 0
    for size, blend in sizes:
        wanted += min(size, left) if blend else 0
        left -= min(size, left)
    assert max(0, wanted - made.reserved) <= room - made.reserved <= wanted


def refused(prompts: Sequence[Prompt], budget: int) -> list[int]:
    server = Server(prompts, budget)
    return [number for number, each in enumerate(prompts) if each.rows is not None and each not in server.loaded]


def blends(*rows: int | None) -> list[Prompt]:
    """Prompts of 700 tokens, told apart by a token."""
    return [Prompt(700 + number, each) for number, each in enumerate(rows)]


@pytest.mark.parametrize("behind", [0, 1, 2, 8])
def test_a_blend_is_made_whatever_fills_the_steps(behind: int) -> None:
    """The step in which it is recomputed is cut, so that its last tokens are computed before what others would have filled it with."""
    prompts = blends(200, *[None] * behind)
    assert refused(prompts, 1000) == []
    assert Server(prompts, 1000).done["0"] <= 1000


def test_all_blends_of_a_burst_are_made() -> None:
    """All at once, the queue is as much shorter as they save, but for what short steps cost."""
    for prompts, budget in ((blends(*[200] * 40), 2048), (blends(*[200, None, None, None, None] * 8), 1500)):
        server, without = Server(prompts, budget), Server(prompts, budget, loads=False)
        assert refused(prompts, budget) == []
        saved = sum(each.tokens - each.rows - TAIL for each in prompts if each.rows is not None)
        assert server.time <= without.time - saved / 2


@pytest.mark.parametrize(
    ("last", "behind", "made"),
    [(674, 8, False), (674, 0, True), (100, 8, True)],
    ids=["little in a full server", "little in an idle one", "much in a full server"],
)
def test_an_exact_load_of_less_than_a_short_step_costs_is_refused_where_others_fill_the_steps(
    last: int, behind: int, made: bool
) -> None:
    loaded = Prompt(699, 0, last=last)
    server = Server([loaded, *blends(*[None] * behind)], 1000)
    assert server.loaded == [loaded] * made
    assert server.done["0"] <= 1000


def test_a_load_that_was_looked_up_since_is_not_decided() -> None:
    queue = BlendQueue(1000)
    queue.share_out([WaitingBlend("a", 700)])
    assert queue.pays("a", 0, TAIL) is None
    assert queue.pays("b", 0, TAIL) is None


def test_the_lead_is_what_blends_saved_and_steps_did_not_leave() -> None:
    """A blend that failed, or whose client left, saves nothing."""
    queue = BlendQueue(1000)
    queue.promised(684, 200)
    assert queue.lead == 484
    assert queue.stepped(700) == 300  # 200 of them for the blend
    queue.share_out([])
    assert queue.lead == 384
    queue.promised(684, 200)
    queue.failed(684)
    queue.share_out([])
    assert queue.lead == 384
    queue.stepped(0)
    assert queue.lead == 0
