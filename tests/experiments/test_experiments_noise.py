"""Arms that did equal work are a gauge of a run's noise: no ratio is claimed that the noise explains."""

import io
import json
import random
from typing import Any

import pytest
from rich.console import Console

from dejakv.experiments.plain_words import in_plain_words
from dejakv.experiments.report.run_section import run_section
from dejakv.experiments.run import run
from dejakv.experiments.scoring import mean_interval, ratio_interval
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import Outcome, Row, summarize
from dejakv.experiments.table import show
from dejakv.records import Record


def row(number: int, none: float, prefix: float, cache: float, held: int = 0) -> Row:
    """`held`: tokens of a prefix hit."""

    def outcome(ms: float, computed: int) -> Outcome:
        return Outcome(Record(str(number), prompt_tokens=100, computed_tokens=computed, ttft_ms=ms), "a", None, 1)

    arms = {"none": outcome(none, 100), "prefix": outcome(prefix, 100 - held), "cache": outcome(cache, 60)}
    return Row(f"s{number}", "?", None, arms)


def summary_of(rows: list[Row]) -> dict[str, Any]:
    return summarize(rows, "m", "rag", {})


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(summary | {"hook_counts": {}}, console=console)
    return console.export_text()


def noisy(seed: int = 3) -> list[Row]:
    """The demo's case: 12 requests, no prefix hits, prefix .6 to 2 times the time of none, and 0.72 of the tokens."""
    rng = random.Random(seed)
    return [row(i, 100.0, 100.0 * rng.uniform(0.6, 2.0), 75.0 * rng.uniform(0.8, 1.2)) for i in range(12)]


def quiet(held: int = 0, count: int = 30) -> list[Row]:
    rng = random.Random(3)
    return [row(i, 100.0, 100.0 * rng.uniform(0.97, 1.03), 60.0 * rng.uniform(0.97, 1.03), held) for i in range(count)]


def test_a_ratio_within_the_noise_is_not_claimed() -> None:
    summary = summary_of(noisy())
    beyond = summary["beyond_prefix"]
    low, high = beyond["noise"]["ttft_ratio_interval"]
    assert beyond["ttft_difference_interval"][1] < 0  # it was claimed before
    assert beyond["noise"]["requests"] == 12
    words = in_plain_words(summary)
    assert "as fast" not in words[0]
    assert f"within this run's noise ({low:.2f} to {high:.2f})" in words[0]
    assert words[1].startswith("Noise of this run: over 12 requests with equal work prefix caching took ")
    text = shown(summary)
    assert "reuse beyond prefixes pays" not in text
    assert text.count(f"within this run's noise ({low:.2f} to {high:.2f})") == 2  # in the verdict and in the sentence


def test_a_ratio_beyond_the_noise_is_claimed_with_its_interval() -> None:
    summary = summary_of(quiet())
    words = in_plain_words(summary)
    low, high = summary["beyond_prefix"]["ttft_ratio_interval"]
    assert f"1.7 x as fast to the first token as prefix caching (95%: {1 / high:.1f} to {1 / low:.1f})" in words[0]
    assert "Noise of this run" in words[1]
    assert "reuse beyond prefixes pays" in shown(summary)


def test_slower_is_claimed_by_the_same_rule() -> None:
    slower = [row(i, 100.0 + i % 3, 100.0 + i % 2, 150.0 + i % 5) for i in range(12)]
    assert in_plain_words(summary_of(slower))[0].startswith("Slower to the first token than prefix caching by 5")
    loud = [row(i, 100.0, 60.0 + 20 * (i % 2), 110.0 + i % 5) for i in range(12)]
    assert "within this run's noise" in in_plain_words(summary_of(loud))[0]


@pytest.mark.parametrize("held", [0, 50])
def test_where_prefixes_were_hit_there_is_no_gauge(held: int) -> None:
    noise = summary_of(quiet(held))["beyond_prefix"]["noise"]
    assert (noise is None) is bool(held)
    mixed = [*quiet(50, 10), *quiet(0, 20)]
    assert summary_of(mixed)["beyond_prefix"]["noise"]["requests"] == 20
    assert summary_of([*quiet(50, 20), *quiet(0, 10)])["beyond_prefix"]["noise"] is None


def test_without_full_computation_there_is_no_gauge_and_the_interval_speaks() -> None:
    rows = [Row(one.sample_id, "?", None, {name: one.arms[name] for name in ("prefix", "cache")}) for one in quiet()]
    summary = summary_of(rows)
    assert summary["beyond_prefix"]["noise"] is None
    assert "as fast to the first token as prefix caching (95%" in in_plain_words(summary)[0]


def test_few_samples_widen_the_interval() -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 0.1) for _ in range(4)]
    mean, low, high = mean_interval(values)
    from scipy import stats

    wanted = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert (low, high) == pytest.approx(wanted, rel=0.01)
    assert ratio_interval([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == (2.0, 2.0, 2.0)
    misses = 0
    for _ in range(1000):
        under = [rng.uniform(50, 150) for _ in range(12)]
        _, low, high = ratio_interval([0.7 * value * rng.uniform(0.6, 1.4) for value in under], under)
        misses += not low <= 0.7 <= high
    assert misses < 90  # 50 are promised


def test_no_accuracy_where_the_references_are_no_answers(docs_engine: Any, tmp_path: Any) -> None:
    names = ("cats", "dogs", "fish")
    lines = [{"passage": f"Ann lives in Rome. Bob likes {name}. Dan lives in Oslo."} for name in names]
    asked = [{"question": f"Who likes {name}?", "answer": f"Bob likes {name}."} for name in names]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *asked]))
    given = {"model": "docs-lm", "dataset": "rag", "dataset_path": str(tmp_path / "corpus.jsonl"), "max_new_tokens": 2}
    folder = tmp_path / "run"
    result = run(settings_from(None, {**given, "passages": 1, "output": str(folder)}, {}), engine=docs_engine)
    assert any(one.answer is not None for one in result.rows)  # it is shown beside changed answers
    assert {arm["accuracy"] for arm in result.summary["arms"].values()} == {None}
    page = "".join(block.html for block in run_section(folder, result.summary, "s").blocks)
    assert "accuracy" not in shown(result.summary)
    assert "<td>accuracy<" not in page


def test_accuracy_where_they_are(docs_engine: Any, tmp_path: Any) -> None:
    folder = tmp_path / "run"
    result = run(settings_from("docs", {"max_samples": 4, "output": str(folder)}, {}), engine=docs_engine)
    page = "".join(block.html for block in run_section(folder, result.summary, "s").blocks)
    assert "accuracy" in shown(result.summary)
    assert "<td>accuracy<" in page
