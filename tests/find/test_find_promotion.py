"""Prompts answered approximately are remembered by key, within a bound, a partition at a time."""

import pytest

from dejakv.find import promotion
from dejakv.find.promotion import Promotions


def test_a_prompt_is_due_until_it_ran_exactly() -> None:
    prompts = Promotions()
    assert not prompts.due("k")
    prompts.note("k", "a")
    assert prompts.due("k")
    prompts.forget("k")
    prompts.forget("k")
    assert not prompts.due("k")


def test_partitions_are_cleared_apart_and_together() -> None:
    prompts = Promotions()
    for key, partition in (("1", "a"), ("2", "b"), ("3", "a")):
        prompts.note(key, partition)
    prompts.clear("a")
    assert [prompts.due(key) for key in "123"] == [False, True, False]
    prompts.clear()
    assert not prompts.due("2")


def test_the_oldest_are_forgotten_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "REMEMBERED", 3)
    prompts = Promotions()
    for key in "12345":
        prompts.note(key, "a")
    assert [prompts.due(key) for key in "12345"] == [False, False, True, True, True]
