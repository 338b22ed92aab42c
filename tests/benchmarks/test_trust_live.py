"""The live benchmark of the error bound: what it records of a stream, and what it makes of the record."""

from dataclasses import replace
from itertools import islice, repeat
from typing import Any

from benchmarks.trust.live import Step, figures, line, steps, told
from tests.bounded import BOUNDED, hits, says, taught

from dejakv.find.bound import setting_of
from dejakv.pipeline import Pipeline
from dejakv.trust.features import LATE_BLEND, TIME_SHARE
from dejakv.trust.gate import Gate
from dejakv.trust.labels import LabelledHit
from dejakv.trust.settings import TrustSettings


def test_a_stream_is_recorded_step_by_step(served: Any) -> None:
    config = replace(BOUNDED, error_bound=0.9, confidence=0.5, differs=says(repeat(False)))
    pipeline = served(config)
    taught(pipeline)
    known = [LabelledHit(n, "blend", {"share_rows": 0.5}, {"first": False}, margin=n / 20) for n in range(30)]
    gate = pipeline.cache.gate
    gate.settings = replace(gate.settings, differs="first")  # what the table knows
    assert told(gate, pipeline.engine.epoch, setting_of("blend", config), known) >= 1
    stream = hits()
    taken = list(steps(pipeline, Pipeline(pipeline.engine), list(islice(stream, 2)), list(islice(stream, 2))))
    assert [step.drifted for step in taken] == [False, False, True, True]
    assert all(step.hit for step in taken)
    assert any(step.served for step in taken)
    assert taken[-1].labels > 0
    assert not any(step.wrong for step in taken), "the measure of the run says so"


def test_a_recorded_blend_counts_for_the_rules_that_spend_what_it_took() -> None:
    gate = Gate(TrustSettings(error_bound=0.2, confidence=0.9))
    hits = [
        LabelledHit(
            n, "blend", {}, {"first": bool(n % 2)}, prompt_tokens=10, computed_tokens=9 if n % 2 else 1, margin=5.0 + n
        )
        for n in range(400)
    ]  # what takes long is wrong
    told(gate, "e", "s", hits)
    known = {"partition": "default", "epoch": "e", "method": LATE_BLEND, "setting": "s"}
    assert gate.tries({TIME_SHARE: 0.1}, **known)
    assert not gate.tries({TIME_SHARE: 0.9}, **known)


def test_hits_without_a_margin_tell_a_late_gate_nothing() -> None:
    gate = Gate(TrustSettings(error_bound=0.1))
    assert told(gate, "e", "s", [LabelledHit(1, "blend", {}, {"first": True})]) == 0
    assert gate.report().classes == ()


def _step(number: int, drifted: bool, *, served: bool = True, wrong: bool = False, alarms: int = 0) -> Step:
    return Step(number, drifted, True, served, wrong, "closed" if alarms else "open", 1, 0, alarms)


def test_figures_are_those_of_the_record() -> None:
    before = [_step(number, False, wrong=number == 3) for number in range(10)]
    after = [_step(10, True, wrong=True), _step(11, True, served=False), _step(12, True, wrong=True, alarms=1)]
    found = figures([*before, *after, _step(13, True, served=False, alarms=1)])
    assert (found["before"]["served"], found["before"]["wrong"], found["before"]["error"]) == (10, 1, 0.1)
    low, high = found["before"]["interval"]
    assert low < 0.1 < high
    assert found["after"]["open"] == 2
    assert found["noticed"] == {"requests": 3, "served": 2, "wrong": 2}
    assert "noticed" not in figures(before)
    assert line(after[0]).startswith("   10 after  wrong    gate open")
