"""Estimates: the figures of small logs worked out by hand, the rule of the recommendation, and bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, DatasetError, DejaKVError, InputError
from dejakv.experiments.advice import command_of, hits_needed, in_plain_words, in_words_of_bound, labels_for, recommend
from dejakv.experiments.estimate import Asked, measure, once, settings_to_try
from dejakv.experiments.estimate import estimate as tune
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import wilson
from dejakv.request import Request
from dejakv.trust.evidence import labels_needed

LETTERS = {"a": (1.0, 0.0), "b": (0.9, 0.43588989), "c": (0.0, 1.0)}


class Letters:
    """Texts by their first letter: a and b have a cosine of 0.9, a and c of 0."""

    fingerprint = "letters"
    dim = 2

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> Any:
        self.encoded.append(text)
        return np.array(LETTERS[text[0]], np.float32)


def adopting(threshold: float | None = None, **more: Any) -> SemanticCacheConfig:
    """Equal texts, and with a threshold similar ones, whatever their words."""
    similar = {} if threshold is None else {"similarity_threshold": threshold, "lexical_guard": False}
    return SemanticCacheConfig(reuse="adopt", semantic_text=threshold is not None, **similar, **more)


def asked(text: str, answer: str | None, number: int) -> Asked:
    request = Request(str(number), text, text)
    return Asked(Prepared(request, tuple(range(100 * number, 100 * number + 40)), epoch="tune"), answer)


def test_hits_and_false_hits_by_threshold() -> None:
    log = [asked("a one", "red", 1), asked("b two", "blue", 2), asked("c three", "red", 3), asked("a four", "red", 4)]
    encoder = Letters()
    loose = measure(log, adopting(0.8), encoder)
    # b takes a's answer, which is wrong, and is not stored; a takes a's, which is right.
    assert (loose["hits"], loose["judged"], loose["false_hits"]) == (2, 2, 1)
    assert loose["false_hit_interval"] == wilson(1, 2)
    assert loose["tokens_saved"] == 2 * 39  # of an adopted prompt all but the last token
    strict = measure(log, adopting(0.95), encoder)
    assert (strict["hits"], strict["false_hits"]) == (1, 0)
    exact = measure(log, SemanticCacheConfig(semantic_text=False))
    assert (exact["hits"], exact["judged"], exact["false_hits"], exact["tokens_saved"]) == (0, 0, None, 0)


def test_an_equal_prompt_is_exact_and_never_false() -> None:
    row = measure([asked("a", "red", 1), asked("a", "blue", 1)], adopting())
    assert (row["exact"], row["hits"], row["tokens_saved"]) == (1, 0, 39)


def test_hits_without_answers_are_not_judged() -> None:
    row = measure([asked("a one", None, 1), asked("a  ONE", "red", 2)], adopting())
    assert (row["hits"], row["judged"], row["false_hit_rate"]) == (1, 0, None)


def test_what_saves_too_little_is_no_hit() -> None:
    log = [asked("a one", "red", 1), asked("A one", "red", 2)]
    row = measure(log, adopting(min_gain=41))
    assert (row["hits"], row["not_worth"]) == (0, 1)


def test_a_text_is_encoded_once() -> None:
    inner = Letters()
    encoder = once(inner)
    for setting in settings_to_try(16):
        measure([asked("a one", "red", 1), asked("b two", "red", 2)], setting, encoder)
    assert sorted(inner.encoded) == ["a one", "b two"]


def row(threshold: float, judged: int, wrong: int, saved: int) -> dict[str, Any]:
    return {
        "level": "semantic_text", "threshold": threshold, "lexical_guard": True, "hits": judged, "judged": judged,
        "false_hits": wrong, "false_hit_rate": wrong / judged if judged else None,
        "false_hit_interval": wilson(wrong, judged) if judged else None, "tokens_saved": saved,
    }  # fmt: skip


def test_the_recommendation_saves_the_most_of_what_is_shown_to_be_right() -> None:
    rows = [row(0.5, 2000, 100, 900), row(0.8, 1500, 0, 700), row(0.9, 1000, 0, 500), row(0.99, 10, 0, 800)]
    found = recommend(rows, 0.01)
    assert found["settings"] == {"reuse": "adopt", "lexical_guard": True, "similarity_threshold": 0.8}
    assert recommend(rows, 0.1)["settings"]["similarity_threshold"] == 0.5


def test_too_few_hits_show_nothing() -> None:
    found = recommend([row(0.9, 20, 0, 500)], 0.01)
    assert found["settings"] == {"reuse": "exact"}
    assert found["candidate"]["similarity_threshold"] == 0.9
    needed = hits_needed(0.0, 0.01)
    assert needed is not None
    assert str(needed) in found["reason"]
    assert wilson(0, needed)[1] <= 0.01 < wilson(0, needed // 2)[1]
    assert hits_needed(0.01, 0.01) is None


def test_wrong_or_unjudged_hits_recommend_exact_reuse() -> None:
    assert "is wrong in more than" in recommend([row(0.9, 100, 50, 500)], 0.01)["reason"]
    unjudged = {**row(0.9, 0, 0, 500), "hits": 5}
    assert "--label-with" in recommend([unjudged], 0.01)["reason"]
    assert "loses nothing" in recommend([row(0.9, 0, 0, 0)], 0.01)["reason"]


def test_the_command_runs_the_recommended_settings() -> None:
    settings = RunSettings(model="m", dataset="jsonl", dataset_path="my log.jsonl", chunk_source="q")
    line = command_of(settings, "model", {
        "reuse": "adopt", "similarity_threshold": 0.9, "lexical_guard": False, "min_gain": 2,
    })  # fmt: skip
    assert "--dataset-path 'my log.jsonl'" in line
    for words in ("--similarity-threshold 0.9", "--disable-lexical-guard", "--min-gain 2", "--chunk-source q"):
        assert words in line


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


LONG = "Ann lives in Paris. Bob lives in Rome. " * 6


def test_a_log_is_tuned_with_the_bundled_model(tmp_path: Path) -> None:
    records = [{"prompt": f"{name} asks: {LONG}", "answer": "Rome"} for name in ("Cid", "Dan", "Cid", "Ann")]
    found = tune(written(tmp_path / "log.jsonl", *records), "docs-lm")
    assert (found["samples"], found["labelled"]) == (4, 4)
    assert found["rows"][0]["exact"] == 1
    assert {row["level"] for row in found["rows"]} == {"exact", "exact_text", "semantic_text"}
    assert found["recommended"]["settings"] == {"reuse": "exact"}


def test_a_hit_whose_donor_has_no_known_answer_is_not_judged(tmp_path: Path) -> None:
    records = [{"prompt": LONG}, {"prompt": LONG.upper(), "answer": "Rome"}]
    found = tune(written(tmp_path / "log.jsonl", *records), "docs-lm", cache={"reuse": "adopt"})
    assert found["dry_run"]["by_level"]["exact_text"]["hits"] == 1
    assert (found["dry_run"]["judged"], found["dry_run"]["false_hits"]) == (0, None)


def test_labels_of_a_model_take_the_place_of_the_logs(tmp_path: Path) -> None:
    records = [
        {"prompt": LONG, "answer": "x"},
        {"prompt": LONG.upper(), "answer": "y"},
        {"prompt": LONG, "answer": "z"},
    ]
    found = tune(written(tmp_path / "log.jsonl", *records), "docs-lm", label_with="docs-lm")
    assert (found["labels"], found["labelled"]) == ("docs-lm", 3)


def test_without_the_model_only_equal_texts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "none"))
    found = tune(written(tmp_path / "log.jsonl", {"prompt": "a"}, {"prompt": "b"}), "smollm2-135m")
    assert [row["level"] for row in found["rows"]] == ["exact", "exact_text"]
    assert "dejakv models get smollm2-135m" in found["notes"][0]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("red?", "RED?"), "up to 1 prompt has a donor that would save fewer than 99 tokens"),
        (("red?", "RED?", "Red?"), "up to 2 prompts have a donor that would save fewer than 99 tokens"),
    ],
)
def test_prompts_that_are_not_worth_a_hit_are_counted_in_words(
    texts: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "none"))
    log = written(tmp_path / "log.jsonl", *({"prompt": text} for text in texts))
    lines = in_plain_words(tune(log, "smollm2-135m", min_gain=99))
    assert [line for line in lines if line.startswith(says)], lines


@pytest.mark.parametrize(
    ("content", "more", "error", "says"),
    [
        ("", {}, DatasetError, "has no prompts"),
        ('{"text": 1}\n', {}, DatasetError, "line 1 has no request"),
        ('{"prompt": "a"}\n', {"max_false_hits": 0.0}, ConfigError, "--max-false-hits"),
        ('{"prompt": "a"}\n', {"max_false_hits": float("nan")}, ConfigError, "--max-false-hits"),
        ('{"prompt": " "}\n', {}, InputError, "empty question"),
        ('{"prompt": "a"}\n', {"label_with": "no-such-model"}, DejaKVError, "no-such-model"),
        ('{"prompt": "a"}\n', {"chunk_source": "nope"}, ConfigError, "nope"),
    ],
)
def test_bad_input(content: str, more: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(error, match=says):
        tune(tmp_path / "log.jsonl", "docs-lm", **more)


def row_of(hits: int, false_hit_rate: float | None, saved: int = 1) -> dict[str, Any]:
    return {
        "hits": hits,
        "false_hit_rate": false_hit_rate,
        "tokens_saved": saved,
        "lexical_guard": True,
        "threshold": 0.9,
    }


def test_the_labels_of_a_bound_are_counted_in_prompts_of_the_log() -> None:
    needed = labels_needed(0.01)
    assert needed is not None
    found = labels_for([row_of(10, 0.0), row_of(20, 0.0, saved=2), row_of(0, None)], 100, 0.01)
    assert found == {"labels": needed, "prompts": 5 * needed, "false_hit_rate": 0.0}
    [line] = in_words_of_bound(found, 0.01)
    assert line.startswith("to bound wrong answers while serving: --error-bound 0.01 serves after about ")
    assert f"{needed:,} labelled hits if no hit is wrong, that is {5 * needed:,} prompts of this log" in line


def test_wrong_hits_take_more_labels_and_too_many_take_for_ever() -> None:
    some = labels_for([row_of(10, 0.005)], 100, 0.01)
    assert some is not None
    assert some["labels"] == labels_needed(0.01, wrong_share=0.005)
    never = labels_for([row_of(10, 0.01)], 100, 0.01)
    assert never == {"labels": None, "prompts": None, "false_hit_rate": 0.01}
    assert in_words_of_bound(never, 0.01) == [
        "to bound wrong answers while serving: --error-bound 0.01 would serve nothing at 1.0% wrong hits"
    ]


def test_without_hits_or_for_a_bound_of_everything_there_is_nothing_to_say() -> None:
    assert labels_for([row_of(0, None)], 100, 0.01) is None
    assert labels_for([row_of(5, 0.0)], 100, 1.0) is None
    assert in_words_of_bound(None, 0.01) == []
