"""Labels that fail: what counts as wrong, and what is lost."""

import itertools
from contextlib import suppress
from typing import Any

import pytest
from tests.labelled import asked, blending, figures

from dejakv.errors import ModelChangedError
from dejakv.idle import Settler


def test_a_run_that_fails_counts_as_wrong(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def fails() -> None:
        raise RuntimeError("out of order")

    pipeline.engine.fails = fails
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
    assert "out of order" in caplog.text


@pytest.mark.parametrize(
    ("error", "counted"), [(ModelChangedError("another one"), (0, 0, 1)), (KeyboardInterrupt(), (1, 1, 0))]
)
def test_a_model_that_changes_loses_the_label_and_an_end_of_the_process_counts_as_wrong(
    served: Any, error: BaseException, counted: tuple[int, int, int]
) -> None:
    made = pipeline, _ = blending(served)
    asked(made)

    def fails() -> None:
        raise error

    pipeline.engine.fails = fails
    with suppress(KeyboardInterrupt):
        assert pipeline.label_one()
    assert figures(pipeline) == counted


def test_a_function_that_raises_counts_as_wrong(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline, _ = blending(served, differs=f"{__name__}:raising")
    asked(made)
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
    assert "no opinion" in caplog.text


def raising(request: Any, full: str, reused: str) -> bool:
    raise ValueError("no opinion")


@pytest.mark.parametrize("ticks", [[0.0, 700.0], [0.0, 1.0, 700.0]])
def test_a_label_that_takes_too_long_counts_as_wrong(served: Any, ticks: list[float]) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    times = itertools.chain(ticks, itertools.repeat(ticks[-1]))
    settler = Settler(pipeline.engine, pipeline.cache, pipeline.run_plans, clock=lambda: next(times))
    assert settler.label_one()
    assert figures(pipeline) == (1, 1, 0)


def test_a_clock_that_is_set_back_or_forward_changes_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    jumps = itertools.cycle([0.0, 4e9, -4e9])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 0, 0)


def test_a_donor_that_is_gone_loses_the_label(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    for meta in list(pipeline.cache.store.metas()):
        pipeline.cache.store.delete(meta.id)
    pipeline.engine.ran.clear()
    assert pipeline.label_one()
    assert pipeline.engine.ran == []
    assert figures(pipeline) == (0, 0, 1)


def test_another_model_loses_the_label(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.epoch = "another epoch"
    assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_a_plan_that_ends_in_an_exact_answer_loses_the_label(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.refuses = "no blend today"
    assert pipeline.label_one()
    assert figures(pipeline) == (0, 0, 1)


def test_stopping_ends_a_label_at_its_next_token_and_counts_as_wrong(served: Any) -> None:
    made = pipeline, _ = blending(served)
    asked(made)
    pipeline.engine.fails = pipeline.stop_settling
    assert pipeline.label_one()
    assert figures(pipeline) == (1, 1, 0)
