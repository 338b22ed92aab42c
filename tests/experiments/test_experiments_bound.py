"""Runs under an error bound."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.documents import COSTS, DOCUMENTS, stream

from dejakv.experiments.reports.plain_words import bound_in_words
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import RunProgress
from dejakv.request import Request

RUN: dict[str, Any] = {"dataset": f"{stream.__module__}:stream", "max_new_tokens": 2, "arms": ("none", "cache")}
CACHE: dict[str, Any] = {"reuse": "blend", "costs": COSTS, "semantic_text": False, "max_generation": 0}
BOUND: dict[str, Any] = {"error_bound": 0.3, "confidence": 0.9, "audit_share": 1.0}
HITS = 6


def ran(engine: Any, output: Path, hits: int, *, resume: bool = False, **cache: Any) -> Any:
    chosen = {**RUN, "max_samples": len(DOCUMENTS) + hits, "output": str(output)}
    return run(settings_from("docs", chosen, {**CACHE, **cache}), engine=engine, resume=resume)


@pytest.fixture(scope="module")
def bounded(docs_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ran(docs_engine, tmp_path_factory.mktemp("bounded"), HITS, **BOUND)


def test_a_bound_labels_holds_back_and_says_so(bounded: Any) -> None:
    trust = bounded.summary["trust"]
    assert json.loads((bounded.output / "summary.json").read_text())["trust"] == json.loads(json.dumps(trust))
    assert {"delta", "confidence", "gate", "explored", "served", "audited", "wrong", "upper", "lost", "rules"} <= set(
        trust
    )
    held_back = sum(count for reason, count in bounded.summary["not_used"].items() if reason.startswith("error bound"))
    assert (trust["delta"], trust["explored"], trust["served"], trust["lost"]) == (0.3, HITS, 0, 0)
    assert held_back == HITS
    assert trust["explored_wrong"] == 0
    assert not any(row.arms["cache"].record.approximate for row in bounded.rows)


def test_a_resumed_run_labels_whole_answers_again(
    docs_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evidence begins anew, and answers of one token would say that longer ones are equal."""
    lengths: list[int] = []

    class Watching(RunProgress):
        def sample(self, done: int, total: int, row: Any) -> None:
            if done == len(DOCUMENTS) + 2:
                raise KeyboardInterrupt

    def judged(asked: Request, _full: str, _reused: str) -> bool:
        lengths.append(asked.sampling.max_new_tokens)
        return False

    monkeypatch.setattr(sys.modules[__name__], "judged", judged, raising=False)
    settings = settings_from(
        "docs",
        {**RUN, "max_samples": len(DOCUMENTS) + 3, "max_new_tokens": 6, "output": str(tmp_path)},
        {**CACHE, **BOUND, "differs": f"{__name__}:judged"},
    )
    assert run(settings, Watching(), docs_engine).stopped
    lengths.clear()
    assert not run(settings, engine=docs_engine, resume=True).stopped
    assert lengths == [6] * 3


def test_a_dry_run_draws_nothing(docs_engine: Any) -> None:
    settings = settings_from(
        "docs", {**RUN, "cache_mode": "dry-run", "max_samples": len(DOCUMENTS) + HITS}, {**CACHE, **BOUND}
    )
    summary = run(settings, engine=docs_engine).summary
    assert sum(count for name, count in summary["plans"].items() if "blend" in name) == HITS


def test_the_line_of_the_report() -> None:
    trust = {
        "delta": 0.01, "confidence": 0.95, "gate": "open", "rules": 2, "explored": 300, "explored_wrong": 1, "served": 50, "audited": 4,
        "wrong": 0, "lost": 3, "upper": 0.009,
    }  # fmt: skip
    [line] = bound_in_words(trust)
    assert line == (
        "error bound 1.0%: open, 2 rules; 300 hits computed both ways (1 wrong), 50 served, 4 of them audited (0 wrong), 3 labels lost; "
        "at most 0.9% of what is served now is wrong (95.0% confidence, if hits do not come in bursts of near-duplicates, which share "
        "one outcome)"
    )
    [line] = bound_in_words(
        {**trust, "upper": None, "gate": "closed", "rules": 0, "lost": 0, "served": 0, "audited": 0}
    )
    assert line == "error bound 1.0%: closed; 300 hits computed both ways (1 wrong), 0 served"
    assert bound_in_words(None) == []
