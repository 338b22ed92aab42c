"""What a row takes in vLLM: which steps tell it, and how their time is counted."""

from types import SimpleNamespace
from typing import Any

import pytest

from dejakv.engines.vllm.lookups import Pace
from dejakv.engines.vllm.messages import Timed


def step(*tokens: int, pictures: bool = False) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens),
        num_scheduled_tokens={str(place): count for place, count in enumerate(tokens)},
        scheduled_encoder_inputs={"0": [0]} if pictures else {},
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock)


def row(pace: Pace) -> float:
    costs = pace.costs
    assert costs is not None
    return costs.row


def test_before_the_first_step_nothing_is_known(pace: Pace) -> None:
    assert pace.costs is None
    pace.over(None)
    assert pace.costs is None


def test_a_row_takes_its_part_of_a_step(pace: Pace, clock: Clock) -> None:
    timed = pace.planned(step(400, 100), alone=True)
    clock.now += 2
    pace.over(timed)
    assert row(pace) == pytest.approx(2 / 500)


def test_a_step_that_is_planned_early_begins_when_the_one_before_it_is_over(pace: Pace, clock: Clock) -> None:
    """Asynchronous scheduling plans a step while another one runs, and the engine may have slept before that."""
    pace.over(None)
    clock.now += 50
    first, second = pace.planned(step(500), alone=True), pace.planned(step(500), alone=True)
    for timed in (first, second):
        clock.now += 1
        pace.over(timed)
    assert row(pace) == pytest.approx(1 / 500)


@pytest.mark.parametrize(
    ("output", "alone"),
    [
        (step(255), True),  # too few
        (step(256), False),  # rows of a blend beside it
        (step(256, pictures=True), True),
        (step(200, *[1] * 56), True),  # most requests decode
    ],
)
def test_other_steps_tell_nothing(pace: Pace, output: Any, alone: bool) -> None:
    assert pace.planned(output, alone=alone) is None


def test_a_slow_step_changes_little(pace: Pace, clock: Clock) -> None:
    for seconds in (1, 60, 1):
        timed = pace.planned(step(1000), alone=True)
        assert timed == Timed(clock.now, 1000)
        clock.now += seconds
        pace.over(timed)
    assert row(pace) == pytest.approx(1 / 1000)
