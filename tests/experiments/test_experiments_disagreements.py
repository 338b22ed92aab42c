"""Changed answers side by side, and the result in plain words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.experiments.plain_words import in_plain_words
from dejakv.experiments.summary import Outcome, Row, summarize
from dejakv.experiments.table import as_text
from dejakv.experiments.table import changed_answers as disagreements
from dejakv.records import Record


def row(number: int, none: str, cache: str, prefix_ms: float = 100.0, cache_ms: float = 50.0) -> Row:
    def outcome(text: str, ms: float, computed: int = 5) -> Outcome:
        record = Record(str(number), prompt_tokens=10, computed_tokens=computed, ttft_ms=ms, score=0.5)
        return Outcome(record, text, None, ord(text[0]) if text else None)

    arms = {"none": outcome(none, 200.0, 10), "prefix": outcome(none, prefix_ms), "cache": outcome(cache, cache_ms)}
    return Row(f"s{number}", f"question {number}", "expected", arms)


ROWS = [row(1, "red", "red"), row(2, "red", "rust"), row(3, "[bold]x[/bold]", "blue")]


def test_only_changed_answers_are_shown_in_full() -> None:
    assert [changed.sample_id for changed in disagreements(ROWS)] == ["s2", "s3"]
    text = as_text(ROWS)
    for part in ("s2", "red", "rust", "s3", "[bold]x[/bold]", "blue", "expected: expected"):
        assert part in text
    assert "s1" not in text


def test_no_disagreement_is_said() -> None:
    assert "No answer" in as_text(ROWS[:1])


def test_first_tokens_and_answers_are_counted_apart() -> None:
    summary = summarize(ROWS, "m", "d", {})
    assert (summary["agreement"], summary["agreement_first"]) == (1 / 3, 2 / 3)
    assert "First token the same in 2 of 3, the whole answer in 1 of 3." in in_plain_words(summary)


@pytest.mark.parametrize(
    ("prefix", "cache", "says"),
    [
        ((100.0, 101.0), (40.0, 40.4), "2.5 x"),
        ((50.0, 50.5), (100.0, 101.0), "Slower"),
        ((9.0, 11.0), (11.0, 9.0), "no difference that this run can show"),
    ],
)
def test_speed_is_claimed_only_where_the_interval_leaves_out_zero(
    prefix: tuple[float, float], cache: tuple[float, float], says: str
) -> None:
    rows = [row(number, "a", "a", *times) for number, times in enumerate(zip(prefix, cache, strict=True))]
    assert says in in_plain_words(summarize(rows, "m", "d", {}))[0]


@given(st.text(), st.text(), st.text(), st.floats(0, 1e6), st.booleans())
def test_a_row_survives_its_line(question: str, none: str, cache: str, ms: float, approximate: bool) -> None:
    record = Record("r", method="adopt", statuses={"exact_text": "miss"}, ttft_ms=ms, approximate=approximate)
    before = Row("id", question, None, {"none": Outcome(record, none), "cache": Outcome(record, cache, "donor's", 7)})
    assert Row.from_dict(json.loads(json.dumps(before.as_dict()))) == before
