from dejakv.experiments.summary import Outcome, Row, summarize
from dejakv.records import Record


def row(number: int, none: str, cache: str, **record: object) -> Row:
    given = {"level": "semantic_text", "method": "adopt", "prompt_tokens": 10, "computed_tokens": 1, **record}
    cached = Record(str(number), **given)  # type: ignore[arg-type]
    plain = Record(str(number), prompt_tokens=10, computed_tokens=10, encoder_runs=1, ttft_ms=float(number))
    arms = {"none": Outcome(plain, none), "prefix": Outcome(plain, none), "cache": Outcome(cached, cache, "red")}
    return Row(str(number), "q?", "red", arms)


ROWS = [
    row(1, "red", "red"),
    row(2, "red", "blue"),
    row(3, "red", "red", level="exact_text", method="exact"),
    row(4, "blue", "blue", level="prefix", method="prefix", computed_tokens=4),
    row(5, "blue", "blue", level="", method="none", computed_tokens=10, reason="min_gain: too little"),
]


def test_hits_are_the_levels_and_the_prefix_is_apart() -> None:
    summary = summarize(ROWS, "m", "d", {})
    assert summary["hit_rate"] == 3 / 5
    assert summary["prefix_hits"] == 1
    assert summary["by_method"] == {"adopt": 2, "exact": 1, "prefix": 1, "none": 1}
    assert summary["not_used"] == {"min_gain: too little": 1}


def test_agreement_and_false_hits_are_against_the_none_arm() -> None:
    summary = summarize(ROWS, "m", "d", {})
    level = summary["by_level"]["semantic_text"]
    assert (level["hits"], level["false_hits"], level["agreement"]) == (2, 1, 0.5)
    assert summary["by_level"]["exact_text"]["exact_agreement"] == 1.0
    assert summary["agreement"] == 4 / 5
    assert summary["response_cache"] == {"hits": 3, "agreement": 1.0}


def test_arms_sum_over_all_requests() -> None:
    arms = summarize(ROWS, "m", "d", {"store_bytes": 7})["arms"]
    assert arms["none"]["computed_tokens"] == 50
    assert arms["cache"]["computed_tokens"] == 17
    assert (arms["none"]["accuracy"], arms["cache"]["accuracy"]) == (3 / 5, 2 / 5)
    assert arms["none"]["ttft_ms"]["p50"] == 3.0
    assert arms["none"]["encoder_runs"] == 5


def test_a_line_a_sample() -> None:
    line = ROWS[1].as_dict()
    assert (line["agrees"], line["arms"]["cache"]["correct"], line["arms"]["none"]["correct"]) == (False, False, True)


def test_beyond_prefix_is_paired_and_over_all_requests() -> None:
    beyond = summarize(ROWS, "m", "d", {})["beyond_prefix"]
    assert beyond["tokens_ratio"] == 17 / 50
    assert beyond["ttft_difference_ms"] == -3.0
    low, high = beyond["ttft_difference_interval"]
    assert low < -3.0 < high < 0


def test_no_samples_is_no_crash() -> None:
    assert summarize([], "m", "d", {})["hit_rate"] is None


def test_a_hit_by_the_top_layer_may_change_the_answer_and_is_judged() -> None:
    rows = [row(1, "red", "red", method="top_layer"), row(2, "red", "blue", method="top_layer")]
    summary = summarize(rows, "m", "d", {})
    assert summary["hit_rate"] == 1.0
    assert summary["by_level"]["semantic_text"]["false_hits"] == 1
    assert summary["arms"]["cache"]["accuracy"] == 0.5
    assert summary["agreement"] == 0.5


def test_a_line_of_an_older_log_is_read_with_its_label_left_out() -> None:
    line = ROWS[0].as_dict()
    for arm in line["arms"].values():
        arm["label"] = ""
    assert Row.from_dict(line) == ROWS[0]
