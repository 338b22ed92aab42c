"""From records to the figures, tables and sentences of a run: nothing is claimed that was not measured, judged, or beyond the noise."""

import csv
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dejakv.decide.literals import normalize
from dejakv.experiments.reports.plain_words import speed_in_words
from dejakv.experiments.reports.report import run_section
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import (
    ArmOutcome,
    SampleFidelity,
    SampleRow,
    fidelity,
    mean_fidelity,
    mean_interval,
    percentile,
    ratio_interval,
    same_answer,
    summarize,
    wilson,
)
from dejakv.experiments.sweep import sweep
from dejakv.experiments.table import refusal_table, show
from dejakv.records import Record


def row(number: int, none: str, cache: str, **record: object) -> SampleRow:
    given = {"level": "semantic_text", "method": "adopt", "prompt_tokens": 10, "computed_tokens": 1, **record}
    cached = Record(str(number), **given)  # type: ignore[arg-type]
    plain = Record(str(number), prompt_tokens=10, computed_tokens=10, encoder_runs=1, ttft_ms=float(number))
    full = ArmOutcome(plain, none, None, ord(none[0]))
    return SampleRow(
        f"s{number}",
        "q?",
        "red",
        {"none": full, "prefix": full, "cache": ArmOutcome(cached, cache, "red", ord(cache[0]))},
    )


ROWS = [
    row(1, "red", "red"),
    row(2, "red", "rust", score=0.5),
    row(3, "red", "red", level="exact_text", method="exact"),
    row(4, "blue", "blue", level="prefix", method="prefix", computed_tokens=4),
    row(5, "blue", "blue", level="", method="none", computed_tokens=10, reason="min_gain: too little"),
]


def summary_of(rows: list[SampleRow], **sizes: Any) -> dict[str, Any]:
    return summarize(rows, "m", "d", sizes)


def shown(summary: dict[str, Any], rows: Any = ()) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    show(summary, rows, console)
    return " ".join(console.export_text().replace("│", "").split())


def test_the_figures_of_a_summary() -> None:
    summary = summary_of(ROWS, store_bytes=7)
    assert (summary["hit_rate"], summary["prefix_hits"], summary["store_bytes"]) == (3 / 5, 1, 7)
    assert summary["by_method"] == {"adopt": 2, "exact": 1, "prefix": 1, "none": 1}
    assert summary["not_used"] == {"min_gain: too little": 1}
    level = summary["by_level"]["semantic_text"]
    assert (level["hits"], level["judged"], level["false_hits"], level["agreement"]) == (2, 2, 1, 0.5)
    assert summary["by_level"]["exact_text"]["agreement"] == 1.0
    assert (summary["agreement"], summary["agreement_first"]) == (4 / 5, 1.0)
    none, cache = summary["arms"]["none"], summary["arms"]["cache"]
    assert (none["computed_tokens"], cache["computed_tokens"], none["encoder_runs"]) == (50, 17, 5)
    assert (none["accuracy"], cache["accuracy"], none["ttft_ms"]["p50"]) == (3 / 5, 2 / 5, 3.0)
    beyond = summary["beyond_prefix"]
    low, high = beyond["ttft_difference_interval"]
    assert (beyond["tokens_ratio"], beyond["ttft_difference_ms"]) == (17 / 50, -3.0)
    assert low < -3.0 < high < 0
    assert summary_of([])["hit_rate"] is None


@given(st.text(), st.text(), st.text(), st.floats(0, 1e6), st.booleans())
def test_a_row_survives_its_line(question: str, none: str, cache: str, ms: float, approximate: bool) -> None:
    record = Record("r", method="adopt", statuses={"exact_text": "miss"}, ttft_ms=ms, approximate=approximate)
    before = SampleRow(
        "id", question, None, {"none": ArmOutcome(record, none), "cache": ArmOutcome(record, cache, "donor's", 7)}
    )
    assert SampleRow.from_dict(json.loads(json.dumps(before.as_dict()))) == before


def test_changed_answers_alone_are_shown_beside_each_other() -> None:
    text = shown(summary_of(ROWS), [*ROWS, row(6, "[bold]x[/bold]", "blue")])
    for part in ("s2: q? red rust", "score 0.500 red", "s6: q?", "[bold]x[/bold] blue"):
        assert part in text
    assert "s1:" not in text
    alone = SampleRow("alone", "?", None, {"cache": ROWS[1].arms["cache"]})
    assert "changed answers" not in shown(summary_of(ROWS), [ROWS[0], alone])


def test_first_tokens_and_answers_are_counted_apart() -> None:
    text = shown(summary_of(ROWS))
    assert "Answers as in full computation: the first token in 5 of 5, the whole answer in 4 (95%: " in text


def test_the_run_tells_what_stored_answers_would_agree() -> None:
    hits = [row(1, "red", "red"), row(2, "red", "rust"), row(3, "red", "red")]
    for each, answer in zip(hits, ("red", "rust", None), strict=True):
        object.__setattr__(each.arms["cache"], "cached_answer", answer)
    told = "2 of these hits have one, which would come at once; it is full computation's in 1"
    assert told in " ".join(shown(summary_of(hits)).split())


def timed(number: int, none: float, prefix: float, cache: float, held: int = 0) -> SampleRow:
    """`held`: tokens of a prefix hit."""

    def outcome(ms: float, computed: int) -> ArmOutcome:
        return ArmOutcome(Record(str(number), prompt_tokens=100, computed_tokens=computed, ttft_ms=ms), "a", None, 1)

    arms = {"none": outcome(none, 100), "prefix": outcome(prefix, 100 - held), "cache": outcome(cache, 60)}
    return SampleRow(f"s{number}", "?", None, arms)


def quiet(held: int = 0, count: int = 30) -> list[SampleRow]:
    rng = random.Random(3)
    return [timed(i, 100.0, 100 * rng.uniform(0.97, 1.03), 60 * rng.uniform(0.97, 1.03), held) for i in range(count)]


def test_a_ratio_within_the_noise_is_not_claimed() -> None:
    """12 requests, no prefix hits, prefix .6 to 2 times the time of none, and 0.72 of the tokens."""
    rng = random.Random(3)
    summary = summary_of([timed(i, 100.0, 100 * rng.uniform(0.6, 2.0), 75 * rng.uniform(0.8, 1.2)) for i in range(12)])
    low, high = summary["beyond_prefix"]["noise"]["ttft_ratio_interval"]
    assert summary["beyond_prefix"]["ttft_difference_interval"][1] < 0  # chance alone does not explain it
    speed, noise = speed_in_words(summary)
    assert "as fast" not in speed
    assert f"which is no more than noise in this run (equal work took {low:.2f} to {high:.2f} times as long)" in speed
    assert noise.startswith("Noise of this run: over 12 requests with equal work prefix caching took ")
    assert speed in shown(summary)
    assert noise in shown(summary)


def test_a_ratio_beyond_the_noise_is_claimed_with_its_interval() -> None:
    summary = summary_of(quiet())
    low, high = summary["beyond_prefix"]["ttft_ratio_interval"]
    claim = f"1.7 times as fast to the first token as prefix caching (95%: {1 / high:.1f} to {1 / low:.1f})"
    assert speed_in_words(summary)[0].startswith(claim)
    assert claim in shown(summary)


def test_slower_is_claimed_by_the_same_rule() -> None:
    slower = [timed(i, 100.0 + i % 3, 100.0 + i % 2, 150.0 + i % 5) for i in range(12)]
    assert speed_in_words(summary_of(slower))[0].startswith("Slower to the first token than prefix caching by 5")
    loud = [timed(i, 100.0, 60.0 + 20 * (i % 2), 110.0 + i % 5) for i in range(12)]
    assert "no more than noise in this run" in speed_in_words(summary_of(loud))[0]
    crossed = [timed(i, 100.0, *times) for i, times in enumerate(((9.0, 11.0), (11.0, 9.0)))]
    assert "no difference that this run can show" in speed_in_words(summary_of(crossed))[0]


def test_a_cache_that_began_filled_is_not_compared() -> None:
    (line,) = speed_in_words(summary_of(quiet(), started_with_chunks=4))
    assert "no verdict on TTFT" in line


def test_equal_work_is_a_gauge_where_most_requests_did_it() -> None:
    def gauge(rows: list[SampleRow]) -> Any:
        return summary_of(rows)["beyond_prefix"]["noise"]

    assert gauge(quiet())["requests"] == 30
    assert gauge(quiet(50)) is None
    assert gauge([*quiet(50, 10), *quiet(0, 20)])["requests"] == 20
    assert gauge([*quiet(50, 20), *quiet(0, 10)]) is None
    rows = [
        SampleRow(one.sample_id, "?", None, {name: one.arms[name] for name in ("prefix", "cache")}) for one in quiet()
    ]
    assert gauge(rows) is None
    assert "as fast to the first token as prefix caching (95%" in speed_in_words(summary_of(rows))[0]


def test_intervals() -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 0.1) for _ in range(4)]
    mean, low, high = mean_interval(values)
    from scipy import stats

    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values)), rel=0.01)
    assert ratio_interval([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == (2.0, 2.0, 2.0)
    misses = 0
    for _ in range(1000):
        under = [rng.uniform(50, 150) for _ in range(12)]
        _, low, high = ratio_interval([0.7 * value * rng.uniform(0.6, 1.4) for value in under], under)
        misses += not low <= 0.7 <= high
    assert misses < 90  # 50 are promised
    assert wilson(8, 10) == pytest.approx((0.490, 0.943), abs=5e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert (percentile([4, 1, 3, 2], 0.5), percentile([], 0.5), percentile([7], 0.95)) == (2.5, 0.0, 7)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("Yes.", "yes", True), (" Red  ", "red", True), ("red", "blue", False), ("", None, False)],
)
def test_answers_are_compared_without_case_and_white_space(one: str, other: str | None, equal: bool) -> None:
    assert same_answer(one, other) is equal


@pytest.mark.parametrize("preset", ["rag", "docs"])
def test_accuracy_is_told_where_the_references_are_answers(preset: str, docs_engine: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": "docs-lm", "max_samples": 4, "max_new_tokens": 2, "output": str(tmp_path / "run")}
    if preset == "rag":
        names = ("cats", "dogs", "fish")
        lines = [{"passage": f"Ann lives in Rome. Bob likes {name}. Dan lives in Oslo."} for name in names]
        asked = [{"question": f"Who likes {name}?", "answer": f"Bob likes {name}."} for name in names]
        (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *asked]))
        given |= {"dataset_path": str(tmp_path / "corpus.jsonl"), "passages": 1}
    result = run(settings_from(preset, given, {}), engine=docs_engine)
    assert any(one.answer is not None for one in result.rows)  # it is shown beside changed answers
    page = "".join(run_section(tmp_path / "run", result.summary).blocks)
    told = preset == "docs"
    assert [arm["accuracy"] is not None for arm in result.summary["arms"].values()] == 3 * [told]
    assert ("accuracy" in shown(result.summary)) is told
    assert ("<td>accuracy<" in page) is told


def test_reasons_are_grouped_by_who_refused() -> None:
    (sheet,) = refusal_table({"odd": 9, "lexical: content words: a against b": 3, "lexical: numbers: 1 against 2": 2})
    assert sheet.rows == [
        ["other", "9", "odd"],
        ["lexical", "5", "content words: a against b (and 1 other reasons)"],
    ]
    assert refusal_table({}) == []


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, Any]:
    """One question three times, once spelled in another way, without an answer to judge by."""
    asked = ("Where does Ann live?", "where does ann  LIVE", "Where does Ann live?")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in asked))
    given = {"model": "docs-lm", "dataset": "jsonl", "dataset_path": str(tmp_path / "q.jsonl"), "max_new_tokens": 1}
    return {**given, "prompt_template": "<s> Ann lives in Paris. <q> {question} <a>"}


def test_without_answers_no_hit_is_judged(questions: dict[str, Any], docs_engine: Any) -> None:
    dry = run(settings_from(None, {**questions, "cache_mode": "dry-run"}, {}), engine=docs_engine).summary
    assert (dry["judged"], dry["false_hits"], dry["false_hit_rate"]) == (0, None, None)
    assert "exact_text 1 0 - - -" in shown(dry)
    assert "no hit was judged" in shown(dry)
    alone = run(settings_from(None, {**questions, "arms": ("cache",)}, {}), engine=docs_engine).summary
    assert "exact_text 1 1 - -" in shown(alone)


def test_the_log_of_a_sweep_leaves_out_what_nobody_judged(questions: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    sweep({"experiments": [{**questions, "name": "a", "arms": ["cache"]}]}, log)
    (line,) = csv.DictReader(io.StringIO(log.read_text()))
    assert (line["judged_hits"], line["false_hits"]) == ("0", "")


def test_exact_reuse_names_the_flag_that_would_use_what_was_found(
    questions: dict[str, Any], tmp_path: Path, docs_engine: Any
) -> None:
    """Equal texts with other tokens: a unit separator is white space, which docs-lm's tokenizer drops, so that two words become one."""
    asked = ("Where does Ann live?", "Where does\x1fAnn live?")
    assert normalize(asked[0]) == normalize(asked[1])
    ids, others = (docs_engine.tokenizer(text)["input_ids"] for text in asked)
    assert ids != others
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in asked))
    done = run(settings_from(None, {**questions, "arms": ("none", "cache")}, {}), engine=docs_engine)
    assert [row.arms["cache"].record.method for row in done.rows] == ["none", "none"]
    assert list(done.summary["not_used"].values()) == [1]
    assert "found and not used" in shown(done.summary)
    assert "exact_text found a donor whose tokens differ" in shown(done.summary)
    assert "--reuse adopt would use it" in shown(done.summary)


def test_divergence_and_agreement_by_hand() -> None:
    wanted = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], np.float32))
    got = np.log(np.array([[0.25, 0.75], [0.6, 0.4], [0.7, 0.3]], np.float32))
    found = fidelity(wanted, got)
    assert found is not None
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert found.top1 == pytest.approx(1 / 3)  # a tie goes to the first token, in both


def test_nothing_to_compare_is_none() -> None:
    assert fidelity(None, np.zeros((1, 2), np.float32)) is None
    assert fidelity(np.zeros((1, 2), np.float32), None) is None
    assert mean_fidelity([]) == {"kl_mean": None, "top1": None}
    assert mean_fidelity([SampleFidelity(0.2, 1.0), SampleFidelity(0.4, 0.5)]) == {
        "kl_mean": pytest.approx(0.3),
        "top1": 0.75,
    }
