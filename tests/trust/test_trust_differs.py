"""What a wrong answer is."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.trust.differs import ComparedAnswer, differs_of

ASKED = Request("r", "prompt", "chunk")


def seen(text: str = "", *ids: int, probabilities: Sequence[float] | None = None) -> ComparedAnswer:
    logs = None if probabilities is None else np.log(np.array([probabilities], np.float32))
    return ComparedAnswer(text, ids, lambda _: logs)


def wrong(differs: str, full: ComparedAnswer, reused: ComparedAnswer) -> bool:
    return differs_of(differs).wrong(ASKED, full, reused)


def test_first_looks_at_the_first_token_alone() -> None:
    assert not wrong("first", seen("a b", 1, 2), seen("a c", 1, 3))
    assert wrong("first", seen("a b", 1, 2), seen("c b", 3, 2))
    assert wrong("first", seen("a", 1), seen(""))
    assert not wrong("first", seen(""), seen(""))


def test_answer_looks_at_the_whole_text() -> None:
    assert not wrong("answer", seen("a b", 1, 2), seen("a b", 1, 2))
    assert wrong("answer", seen("a b", 1, 2), seen("a c", 1, 3))


def test_kl_looks_at_the_first_distribution() -> None:
    even, near, far = ((0.5, 0.5), (0.6, 0.4), (0.99, 0.01))
    assert not wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=near))
    assert wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=far))
    assert wrong("kl:0.05", seen("", 0, probabilities=even), seen("", 0, probabilities=(float("nan"), 0.5)))


def test_kl_of_an_engine_without_logits_is_an_error_and_none_of_nothing() -> None:
    with pytest.raises(InputError, match="log probabilities"):
        wrong("kl:0.05", seen("", 0), seen("", 0))


@pytest.mark.parametrize(
    "text", ["", "second", "tool", "kl", "kl:", "kl:0", "kl:-1", "kl:nan", "kl:inf", "kl:x", ":f", "module:", "first:1"]
)
def test_an_unknown_way_to_differ_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--differs"):
        differs_of(text)


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def judge(request: Request, full: str, reused: str) -> int:
        told.append((request, full, reused))
        return 1

    monkeypatch.setattr(sys.modules[__name__], "judge", judge, raising=False)
    assert wrong(f"{__name__}:judge", seen("a"), seen("b")) is True
    assert told == [(ASKED, "a", "b")]


@pytest.mark.parametrize("text", ["no_such_module_of_anybody:f", "dejakv.request:no_such_function", "math:pi"])
def test_one_that_cannot_be_had_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--differs"):
        differs_of(text)


def test_how_long_answers_must_be() -> None:
    assert [differs_of(text).tokens for text in ("first", "kl:1", "answer", f"{__name__}:seen")] == [
        1, 1, None, None,
    ]  # fmt: skip
    assert [differs_of(text).logits for text in ("first", "kl:1")] == [False, True]
