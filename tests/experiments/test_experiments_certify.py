"""`dejakv certify`, and pipelines that keep to what it wrote."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.documents import BOUNDED, COSTS, DOCUMENTS, answers_to, hits, says, stream, taught
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.decide.bound import certified_setting
from dejakv.engines.base import FULL, Completion
from dejakv.errors import ConfigError
from dejakv.experiments.certify import audit, certify
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.experiments.summary import RunProgress
from dejakv.trust.certificate import Certificate
from dejakv.trust.rules import PILOT

HITS = PILOT + 30
CONFIG = replace(BOUNDED, error_bound=None, confidence=0.95)
"""Of a server with a certificate."""


def asked(**cache: Any) -> RunSettings:
    run = {"dataset": f"{stream.__module__}:stream", "max_samples": len(DOCUMENTS) + HITS}
    given = {"reuse": "blend", "costs": COSTS, "max_generation": 0, "error_bound": 0.3, "confidence": 0.9, **cache}
    return settings_from("docs", run, given)


@pytest.fixture(scope="module")
def made(docs_engine: Any) -> Certificate:
    return certify(asked(), engine=docs_engine)


@pytest.fixture
def file(made: Certificate, tmp_path: Path) -> Path:
    found = tmp_path / "certificate.json"
    found.write_text(made.text())
    return found


def served_with(served: Any, file: Path, **settings: Any) -> list[Any]:
    """Records of three would-be hits in a pipeline with this certificate."""
    pipeline = served(replace(CONFIG, certificate=str(file), **settings))
    taught(pipeline)
    return [answer.record for answer in answers_to(pipeline, hits(), 3)]


def test_a_log_certifies_what_its_hits_show(made: Certificate, docs_engine: Any) -> None:
    assert (made.counts["requests"], made.counts["not_run"]) == (len(DOCUMENTS) + HITS, 0)
    assert made.counts["hits"] == len(made.hits) >= HITS - 5
    assert made.cutoff is not None
    assert made.upper is not None
    assert made.upper <= 0.3
    assert made.epoch == docs_engine.epoch
    assert made.setting == certified_setting(CONFIG)
    assert made.counts["kept"] == sum(made.serves(hit.risk, hit.tokens) for hit in made.hits)
    assert {"share_rows", "seams", "longest_new", "generation"} <= set(made.hits[0].features)


def test_wrong_answers_are_counted_and_open_nothing(docs_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose blends answer otherwise than full computation."""
    real = type(docs_engine).run

    def run(engine: Any, prepared: Any, plan: Any = FULL, store: Any = None, **more: Any) -> Any:
        ran = real(engine, prepared, plan, store, **more)
        return replace(ran, text="otherwise") if plan.method == "blend" and isinstance(ran, Completion) else ran

    monkeypatch.setattr(type(docs_engine), "run", run)
    made = certify(asked(differs="answer"), engine=docs_engine)
    assert made.counts["wrong"] == made.counts["hits"] > PILOT
    assert (made.cutoff, made.upper, made.counts["kept"]) == (None, None, 0)


def test_a_log_may_repeat_ids_and_a_judge_may_fail(made: Certificate, docs_engine: Any, tmp_path: Path) -> None:
    """Each hit keeps its own risk, and where the judge raises, the answer is wrong. A log that goes on is no surprise either."""

    def judging() -> Iterator[bool]:
        yield from ()
        raise ValueError

    log, most, told = tmp_path / "log.jsonl", len(DOCUMENTS) + 12, list[str]()
    watch = RunProgress()
    watch.stage = told.append
    log.write_text(
        "".join(json.dumps({"id": 7, "question": s.question, "context": s.context}) + "\n" for s in stream())
    )
    settings = asked(differs=says(judging()))
    settings = replace(settings, dataset="jsonl", dataset_path=str(log), max_samples=most)
    again = certify(settings, watch, engine=docs_engine)
    assert len(again.hits) >= 7
    assert [hit.risk for hit in again.hits] == [hit.risk for hit in made.hits][: len(again.hits)]
    assert [hit.wrong for hit in again.hits] == [True, *[False] * (len(again.hits) - 1)]
    assert any(line.startswith(f"read: {most} samples of log.jsonl, which has more") for line in told)


def test_hits_within_the_rules_are_served_and_others_computed(made: Certificate, file: Path, served: Any) -> None:
    assert [record.method for record in served_with(served, file)] == ["blend"] * 3
    low = min(hit.risk for hit in made.hits)
    file.write_text(replace(made, cutoff=low / 2).text())
    for record in served_with(served, file):
        assert (record.approximate, record.stored) == (False, True)
        assert record.reason.startswith("the certificate does not serve such a plan: its risk is 0.")
    file.write_text(replace(made, longest=10).text())
    assert all("no prompt as long in its log" in record.reason for record in served_with(served, file))


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"epoch": "other"}, {}, "of another model or engine"),
        ({"setting": "other"}, {}, "of another setting"),
        ({}, {"blend_share": 0.5}, "of another setting"),
        ({}, {"blend_donors": 2}, "of another setting"),
        ({}, {"min_gain": 8}, "of another setting"),
        ({"dejakv_version": "0.0.9"}, {}, "of another version of dejakv: 0.0.9"),
        ({}, {"error_bound": 0.2}, "of another bound: error_bound is 0.3, 0.2 is asked for"),
        ({"cutoff": None}, {}, "opens no rule"),
        ({"level": "text"}, {}, "not of such a hit"),
        ({"method": "adopt"}, {}, "not of such a hit"),
    ],
)
def test_what_does_not_fit_serves_nothing_approximate(
    made: Certificate,
    file: Path,
    served: Any,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    settings: dict[str, Any],
    said: str,
) -> None:
    file.write_text(replace(made, **changed).text())
    with caplog.at_level(logging.WARNING):
        records = served_with(served, file, **settings)
    for record in records:
        assert (record.approximate, record.reason.startswith("the certificate ")) == (False, True)
        assert said in record.reason
    warned = [line for line in caplog.messages if said in line]
    assert len(warned) == ("of such a hit" not in said)


def test_an_edited_or_missing_file_serves_nothing_approximate(
    file: Path, served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "error_bound": 0.01}))
    assert all("edited or damaged" in record.reason for record in served_with(served, file))
    file.unlink()
    assert all("cannot be read" in record.reason for record in served_with(served, file))
    assert sum("nothing approximate is served" in line for line in caplog.messages) == 2


def test_a_bound_that_is_not_below_the_certificates_is_kept_without_labels(file: Path, served: Any) -> None:
    pipeline = served(replace(CONFIG, certificate=str(file), error_bound=0.3))
    taught(pipeline)
    (answer,) = answers_to(pipeline, hits(), 1)
    assert answer.record.method == "blend"
    assert pipeline.cache.trust(None) is None


def test_an_audit_runs_a_later_log_with_the_certificates_settings(made: Certificate, docs_engine: Any) -> None:
    done = audit(made, {}, engine=docs_engine)
    assert (done.hits, done.served) == (made.counts["hits"], made.counts["kept"])
    assert done.verdict == "holds"
    worse = replace(made, settings={**made.settings, "cache.differs": says(iter([True] * 1000))})
    assert audit(worse, {}, engine=docs_engine).verdict == "does not hold"
    with pytest.raises(ConfigError, match="another model or engine"):
        audit(replace(made, epoch="other"), {"max_samples": 1}, engine=docs_engine)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"error_bound": None}, "give --error-bound"), ({"differs": "kl:0.1"}, "give first, answer or a function")],
)
def test_what_cannot_be_certified_is_refused(docs_engine: Any, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        certify(asked(**changed), engine=docs_engine)


def test_the_command_writes_the_file_and_says_first_what_it_holds_for(tmp_path: Path) -> None:
    log, file, loose = tmp_path / "log.jsonl", tmp_path / "c.json", tmp_path / "d.json"
    samples = stream()[:12]
    log.write_text("".join(json.dumps({"question": s.question, "context": s.context}) + "\n" for s in samples))
    given = ["certify", str(log), "--model", "docs-lm", "--error-bound", "0.3", "--output", str(file)]
    told = CliRunner().invoke(typer_app, given, catch_exceptions=False).stdout.splitlines()
    assert told[0].startswith("This certificate holds for traffic like its log")
    assert Certificate.read(file).counts["requests"] == 12
    assert "dataset_path" not in Certificate.read(file).settings
    again = ["certify", str(file), "--error-bound", "0.4", "--output", str(loose)]
    CliRunner().invoke(typer_app, again, catch_exceptions=False)
    assert Certificate.read(loose).hits == Certificate.read(file).hits
    assert Certificate.read(loose).error_bound == 0.4
    unused = ["certify", str(file), "--differs", "answer", "--error-bound", "0.4", "--output", str(tmp_path / "e.json")]
    for refused in (unused, ["certify", str(log), "--differs", "answer", "--audit", str(file)]):
        with pytest.raises(ConfigError, match="leave out --differs"):
            CliRunner().invoke(typer_app, refused, catch_exceptions=False)
    later = CliRunner().invoke(typer_app, ["certify", str(log), "--audit", str(file)], catch_exceptions=False)
    assert later.exit_code == 0
    assert "too few hits" in later.stdout
