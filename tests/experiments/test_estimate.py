"""Estimates: the figures of small logs worked out by hand, the rule of the recommendation, and bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, DatasetError, DejaKVError
from dejakv.experiments.estimate import EstimatedPrompt, memoized_encoder, settings_to_try, tally
from dejakv.experiments.estimate import estimate as tune
from dejakv.experiments.reports.advice import recommend
from dejakv.experiments.summary import wilson
from dejakv.request import Request

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


def asked(text: str, answer: str | None, number: int) -> EstimatedPrompt:
    request = Request(str(number), text, text)
    return EstimatedPrompt(Prepared(request, tuple(range(100 * number, 100 * number + 40)), epoch="tune"), answer)


def test_hits_and_false_hits_by_threshold() -> None:
    log = [asked("a one", "red", 1), asked("b two", "blue", 2), asked("c three", "red", 3), asked("a four", "red", 4)]
    encoder = Letters()
    loose = tally(log, adopting(0.8), encoder)
    # b takes a's answer, which is wrong, and is not stored; a takes a's, which is right.
    assert (loose["hits"], loose["judged"], loose["wrong"]) == (2, 2, 1)
    assert loose["tokens_saved"] == 2 * 39  # of an adopted prompt all but the last token
    strict = tally(log, adopting(0.95), encoder)
    assert (strict["hits"], strict["wrong"]) == (1, 0)
    exact = tally(log, SemanticCacheConfig(semantic_text=False))
    assert (exact["hits"], exact["judged"], exact["tokens_saved"]) == (0, 0, 0)


def test_hits_without_answers_are_not_judged() -> None:
    row = tally([asked("a one", None, 1), asked("a  One", "red", 2)], adopting())
    assert (row["hits"], row["judged"]) == (1, 0)


def test_a_text_is_encoded_once() -> None:
    inner = Letters()
    encoder = memoized_encoder(inner)
    for setting in settings_to_try(16):
        tally([asked("a one", "red", 1), asked("b two", "red", 2)], setting, encoder)
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
    assert "the nearest (reuse=adopt, lexical_guard=True, similarity_threshold=0.9) has 0 of 20" in found["reason"]


def test_wrong_or_unjudged_hits_recommend_exact_reuse() -> None:
    assert "is wrong in more than" in recommend([row(0.9, 100, 50, 500)], 0.01)["reason"]
    unjudged = {**row(0.9, 0, 0, 500), "hits": 5}
    assert "--label-with" in recommend([unjudged], 0.01)["reason"]
    assert "loses nothing" in recommend([row(0.9, 0, 0, 0)], 0.01)["reason"]


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
    words = f"--dataset log --dataset-path {tmp_path / 'log.jsonl'} --max-samples 2000 --reuse blend --index-encoder model --disable-semantic-cache"
    assert found["command"] == f"dejakv run --model docs-lm {words}"


def test_labels_of_a_model_take_the_place_of_the_logs(tmp_path: Path) -> None:
    records = [
        {"prompt": LONG, "answer": "x"},
        {"prompt": LONG.upper(), "answer": "y"},
        {"prompt": LONG, "answer": "z"},
    ]
    found = tune(written(tmp_path / "log.jsonl", *records), "docs-lm", label_with="docs-lm")
    assert (found["labels"], found["labelled"]) == ("docs-lm", 3)


def test_rules_of_stabilize_are_told_by_what_each_adds_to_prefixes(tmp_path: Path) -> None:
    """A reminder behind the last user message, a clock in the system text, and tools in any order, in OpenAI's form."""
    reminder = "<system-reminder>\nGo on.\n</system-reminder>"
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "abcd"]
    lines, history = [], []
    for step in range(1, 5):
        system = {"role": "system", "content": f"Current time: 10:{step:02d}\nYou help. " + "Read the files. " * 20}
        asked = {"role": "user", "content": f"Question {step}. " + "Say what is in it. " * 10}
        shown = {"role": "user", "content": f"{reminder}\n{asked['content']}"}
        lines.append({"messages": [system, *history, shown], "tools": tools[step - 1 :] + tools[: step - 1]})
        history += [asked, {"role": "assistant", "content": f"It holds {step}."}]
    rows = {row["rules"]: row for row in tune(written(tmp_path / "log.jsonl", *lines), "docs-lm")["stabilize"]}

    logged = rows["as logged"]["tokens_prefix"]
    assert {name: row["changed"] for name, row in rows.items()} == {
        "as logged": 0, "keys": 4, "tools": 3, "properties": 0, "volatile": 4, "passages": 0, "default rules": 4, "all rules": 4,
    }  # fmt: skip
    # Tools stand behind the clock, so that their order matters only where the clock is moved.
    assert rows["tools"]["tokens_prefix"] == rows["passages"]["tokens_prefix"] == logged
    assert rows["all rules"]["tokens_prefix"] > rows["volatile"]["tokens_prefix"] > logged
    assert rows["all rules"]["tokens_prefix"] > rows["all rules"]["prompt_tokens"] / 2


def test_system_texts_of_other_protocols_are_counted_once_by_the_rules(tmp_path: Path) -> None:
    lines = [
        {"instructions": f"Current time: 10:{step:02d}\n" + "Read the files. " * 20, "input": "Go on."}
        for step in range(3)
    ]
    rows = {row["rules"]: row for row in tune(written(tmp_path / "log.jsonl", *lines), "docs-lm")["stabilize"]}
    assert rows["volatile"]["changed"] == 3
    assert abs(rows["volatile"]["prompt_tokens"] - rows["as logged"]["prompt_tokens"]) < 20


def test_without_the_model_only_equal_texts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "none"))
    found = tune(written(tmp_path / "log.jsonl", {"prompt": "a", "answer": "x"}, {"prompt": "b"}), "smollm2-135m")
    assert [row["level"] for row in found["rows"]] == ["exact", "exact_text"]
    assert "dejakv models get smollm2-135m" in found["notes"][-1]


@pytest.mark.parametrize(
    ("content", "more", "error", "says"),
    [
        ("", {}, DatasetError, "has no prompts"),
        ('{"text": 1}\n', {}, DatasetError, "has no prompts: line 1: it has no conversation"),
        ('{"prompt": "a"}\n', {"max_false_hits": 0.0}, ConfigError, "--max-false-hits"),
        ('{"prompt": "a"}\n', {"max_false_hits": float("nan")}, ConfigError, "--max-false-hits"),
        ('{"prompt": " "}\n', {}, DatasetError, "has no prompts: line 1: .* an empty one"),
        ('{"prompt": "a"}\n', {"label_with": "no-such-model"}, DejaKVError, "no-such-model"),
        ('{"prompt": "a"}\n', {"chunk_source": "nope"}, ConfigError, "nope"),
    ],
)
def test_bad_input(content: str, more: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(error, match=says):
        tune(tmp_path / "log.jsonl", "docs-lm", **more)
