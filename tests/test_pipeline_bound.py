"""An error bound from the first request on: it opens, serves, audits and closes; or it never opens."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.documents import BOUNDED, answers_to, hits, many_hits, says, taught, uncached
from tests.services import python

from dejakv.pipeline import Answer, Pipeline
from dejakv.trust.evidence import labels_needed
from dejakv.trust.report import TrustReport
from dejakv.trust.rules import PILOT

LABELS = 45
"""More than enough for the strictest rule, of whose band every fifth hit is."""


def trust(pipeline: Pipeline) -> TrustReport:
    assert pipeline.cache is not None
    report = pipeline.cache.trust("default")
    assert report is not None
    return report


def approximate(answers: list[Answer]) -> int:
    return sum(answer.record.approximate for answer in answers)


def until_open(pipeline: Pipeline, stream: Iterator[Any]) -> list[Answer]:
    """The answers until something approximate was served."""
    answers: list[Answer] = []
    while not approximate(answers):
        answers += answers_to(pipeline, stream, 1)
        assert len(answers) < PILOT + LABELS
    return answers


@pytest.mark.slow
def test_it_opens_serves_audits_and_closes_after_a_drift(docs_engine: Any, served: Any) -> None:
    turned: list[bool] = []
    pipeline = served(replace(BOUNDED, differs=says(iter(lambda: bool(turned), None))))
    taught(pipeline)
    stream = hits()
    answers = until_open(pipeline, stream)
    closed, opened = answers[:-1], answers[-1]
    assert closed
    for answer in closed:
        assert answer.record.reason.startswith("error bound: ")
        assert not answer.record.approximate
    report = trust(pipeline)
    assert (report.gate, report.served, report.audited, report.wrong) == ("open", 1, 1, 0)
    assert report.upper is not None
    assert report.upper <= BOUNDED.error_bound
    assert (opened.record.method, opened.record.stored) == ("blend", False)
    turned.append(True)
    later = answers_to(pipeline, stream, 26)
    after = trust(pipeline)
    assert (after.gate, after.alarms) == ("closed", 1)
    assert approximate(later) < len(later)
    assert not later[-1].record.approximate
    assert after.wrong > 0


def test_an_audited_prompt_is_hit_exactly_when_it_comes_again(docs_engine: Any, served: Any) -> None:
    pipeline = served(replace(BOUNDED, differs=says(itertools.repeat(False))))
    taught(pipeline)
    stream, last = hits(), None
    for last in stream:
        if approximate(answers_to(pipeline, iter([last]), 1)):
            break
    assert last is not None
    again = pipeline.answer(last)
    assert (again.record.method, again.record.computed_tokens) == ("exact", 1)
    assert again.token_ids == uncached(docs_engine, last).token_ids


def test_without_enough_labels_it_never_opens(served: Any) -> None:
    pipeline = served(replace(BOUNDED, error_bound=0.01))
    taught(pipeline)
    answers = answers_to(pipeline, hits(), PILOT + 5)
    report = trust(pipeline)
    assert approximate(answers) == 0
    assert (report.gate, report.served, report.explored, report.upper) == ("closed", 0, PILOT + 5, None)
    assert f"of {labels_needed(0.01, BOUNDED.confidence)} at least" in answers[-1].record.reason


@pytest.mark.slow
def test_while_no_audit_is_made_serving_ends(served: Any) -> None:
    """A server that is never idle audits nothing. It must not serve for ever, and goes on when the audits are made."""
    pipeline = served(replace(BOUNDED, differs=says(itertools.repeat(False))))
    taught(pipeline)
    stream = many_hits()
    until_open(pipeline, stream)
    busy = [pipeline.answer(asked) for asked in itertools.islice(stream, 90)]
    assert 0 < approximate(busy) <= 40
    assert approximate(busy[-40:]) == 0
    while pipeline.settle_one():
        pass
    report = trust(pipeline)
    assert (report.gate, report.alarms, report.lost) == ("open", 0, 0)
    assert any(approximate(answers_to(pipeline, stream, 1)) for _ in range(40))


KILLED = """
import os, sys
from dataclasses import replace
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from tests.documents import BOUNDED, hits, taught
engine = TransformersEngine.from_pretrained("docs-lm", dtype="fp32")
pipeline = Pipeline(engine, build_cache(replace(BOUNDED, cache_dir=sys.argv[1]), engine, background=False))
taught(pipeline)
for _, asked in zip(range(25), hits()):
    pipeline.answer(asked)
print(pipeline.waiting, flush=True)
os._exit(9)
"""


def test_labels_that_a_killed_process_waited_for_count_as_wrong(served: Any, tmp_path: Path) -> None:
    """Else a restart could choose which labels count: wrong ones may take longer."""
    done = python("-c", KILLED, tmp_path)
    assert done.returncode == 9, done.stderr
    waited = int(done.stdout)
    assert waited > 0
    pipeline = served(replace(BOUNDED, cache_dir=str(tmp_path)))
    answers_to(pipeline, itertools.islice(hits(), 30, None), 1)
    report = trust(pipeline)
    assert (report.explored_wrong, report.lost) == (waited, 0)


def test_evidence_outlives_the_process_and_another_partition_begins_anew(
    docs_engine: Any, served: Any, tmp_path: Path
) -> None:
    config = replace(BOUNDED, cache_dir=str(tmp_path), differs=says(itertools.repeat(False)))
    first = served(config)
    taught(first)
    stream = hits()
    until_open(first, stream)
    second = served(config)
    assert answers_to(second, stream, 1)[0].record.approximate
    taught(second, "other")
    [answer] = answers_to(second, hits("other"), 1)
    assert not answer.record.approximate
    assert second.cache.trust("other").served == 0


def test_an_unsure_blend_is_declined_once_it_was_tried(docs_engine: Any, served: Any) -> None:
    """Nobody sees a token of it; the prompt is computed in full, and its state is kept."""
    pipeline = served(replace(BOUNDED, differs=says(itertools.repeat(False))))
    taught(pipeline)
    stream = hits()
    until_open(pipeline, stream)
    gate, asked, given = pipeline.cache.gate, next(stream), []
    gate.draw, draw = lambda *asked: replace(draw(*asked), served=False, reason="unsure"), gate.draw
    answer = pipeline.answer(asked, on_token=lambda token, _: given.append(token))
    assert (answer.record.method, answer.record.approximate, answer.record.stored) == ("prefix", False, True)
    assert answer.record.reason == "error bound: unsure"
    assert answer.token_ids == tuple(given) == uncached(docs_engine, asked).token_ids
    assert answer.decision.trial.draw.risk < 1, "it was judged by its first token"
