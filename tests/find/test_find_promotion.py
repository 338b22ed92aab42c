"""Approximately answered prompts wait within bounds, each once, a partition at a time."""

from typing import Any

from dejakv.decide.promotion import PREFILL, PromotionCounts, Promotions
from dejakv.engines.base import Prepared
from dejakv.request import Media, Request


def asked(key: str, partition: str = "a", **more: Any) -> Prepared:
    return Prepared(Request(key, f"prompt {key}", key, partition=partition, **more), (1, 2, 3), epoch="e")


def noted(prompts: Promotions, keys: str, **more: Any) -> Promotions:
    for key in keys:
        prompts.note(key, asked(key, **more))
    return prompts


def taken(prompts: Promotions) -> str:
    found = ""
    while (item := prompts.take()) is not None:
        found += item.key
    return found


def test_the_newest_prompt_comes_first_and_each_once() -> None:
    assert taken(noted(Promotions(), "12321")) == "123"
    assert taken(Promotions()) == ""


def test_what_waits_is_the_prompt_and_not_what_a_caller_hung_on_it() -> None:
    prompts = Promotions()
    prompts.note("k", asked("k", metadata={"options": object()}))
    item = prompts.take()
    assert item is not None
    assert (item.request.prompt, item.request.chunk, item.epoch) == ("prompt k", "k", "e")
    assert (item.request.sampling, item.request.metadata) == (PREFILL, {})


def test_a_prompt_that_was_computed_exactly_waits_no_longer() -> None:
    prompts = noted(Promotions(), "12")
    prompts.forget("2")
    prompts.forget("2")
    assert taken(prompts) == "1"


def test_partitions_are_cleared_apart() -> None:
    prompts = noted(noted(Promotions(), "13"), "2", partition="b")
    prompts.clear("a")
    assert taken(prompts) == "2"


def test_the_oldest_are_dropped_beyond_either_bound() -> None:
    prompts = noted(Promotions(most=3), "12345")
    assert prompts.counts == PromotionCounts(waiting=3, dropped=2)
    assert taken(prompts) == "543"
    large = noted(Promotions(most_bytes=250), "123", media=(Media(bytes(100)),))
    assert large.counts == PromotionCounts(waiting=2, dropped=1)
    assert taken(large) == "32"
    assert taken(noted(large, "4")) == "4"
    too_large = noted(Promotions(most_bytes=50), "1", media=(Media(bytes(100)),))
    assert too_large.counts == PromotionCounts(waiting=0, dropped=1)
