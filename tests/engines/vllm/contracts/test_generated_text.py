"""State of answers, on the model of integers: the next turn of a chat computes its new message, after a restart as well."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, ROW, Asked, ToyEngine, answer
from vllm_harness import tokens

from dejakv.engines.vllm.request import LookupResult
from dejakv.store.base import StateInfo

PROMPT, NEW = tokens(40, 21), tokens(9, 22)
ANSWERED = 60
KEEP = {"generated_text": "keep", "memory_bytes": 0}


def next_turn(engine: ToyEngine, before: Asked) -> Asked:
    asked = engine.ask([*before.prompt, *before.tokens, *NEW], count=5)
    assert asked.tokens == answer(asked.prompt, 5, engine.weight)
    return asked


@pytest.mark.parametrize("setting", ["keep", "off"])
def test_next_turn_computes_what_follows_the_last_whole_page(
    toy: Callable[..., ToyEngine], tmp_path: Path, setting: str
) -> None:
    extra = {**KEEP, "store": str(tmp_path), "generated_text": setting}
    engine = toy(extra)
    first = engine.ask(PROMPT, count=ANSWERED)
    engine.settle()
    second = next_turn(toy(extra), first)
    reused = (len(PROMPT) + ANSWERED - 1 if setting == "keep" else len(PROMPT)) // BLOCK * BLOCK
    assert second.told["tokens_reused"] // BLOCK * BLOCK == reused
    assert second.told["approximate"] is second.told["bitwise"] is False


def test_answer_to_a_stored_prompt_is_kept_too(toy: Callable[..., ToyEngine]) -> None:
    """Its prompt is not stored again, and each next turn goes on from the last one's answer."""
    engine = toy(KEEP)
    engine.ask(PROMPT)
    engine.forget()
    asked = engine.ask(PROMPT, count=ANSWERED)
    for _ in range(2):
        engine.forget()
        length = len(asked.prompt) + len(asked.tokens)
        asked = next_turn(engine, asked)
        assert asked.told["tokens_reused"] >= (length - 1) // BLOCK * BLOCK


def test_answer_behind_a_prompt_that_was_admitted_at_second_sight_is_kept(toy: Callable[..., ToyEngine]) -> None:
    engine = toy({**KEEP, "second_sight": True})
    for _ in range(2):
        asked = engine.ask(PROMPT, count=ANSWERED)
        engine.forget()
    reused = next_turn(engine, asked).told["tokens_reused"]
    assert reused >= (len(PROMPT) + ANSWERED - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("wish", [{"no_store": True}, {}])
def test_answer_that_is_aborted_leaves_what_was_computed_or_nothing(
    toy: Callable[..., ToyEngine], wish: dict[str, Any]
) -> None:
    # Increments of two blocks: the pages of an answer are stored as they fill.
    engine = toy({**KEEP, "max_pending_bytes": 4 * BLOCK * ROW})
    name = engine.add(PROMPT, count=150, **wish)
    while len(engine.asked[name].tokens) < 100:
        engine.step()
    engine.abort(name)
    engine.forget()
    reused = next_turn(engine, engine.asked[name]).told["tokens_reused"]
    assert not reused if wish else len(PROMPT) + 2 * BLOCK <= reused <= len(PROMPT) + 100


def test_weights_that_change_while_it_is_answered_end_the_saves(toy: Callable[..., ToyEngine]) -> None:
    engine = toy(KEEP)
    name = engine.add(PROMPT, count=ANSWERED)
    while len(engine.asked[name].tokens) < 5:
        engine.step()
    engine.reset(connector=True)
    engine.drain()
    engine.forget()
    assert not next_turn(engine, engine.asked[name]).told["tokens_reused"]


@pytest.mark.parametrize("fallback", [None, LookupResult("exact", ("b",), 2)], ids=["nothing", "a prefix"])
def test_answer_is_still_stored_where_a_blend_gives_way_to(fallback: LookupResult | None) -> None:
    prompt = StateInfo("id", "p", "e", (1, 2, 3), "", "")
    blend = LookupResult("blend", ("a",), 3, key="id", save=prompt, save_behind=prompt, fallback=fallback)
    exact = blend.without_blend("why")
    assert (exact.key, exact.save, exact.save_behind, exact.reason) == ("id", prompt, prompt, "why")
    assert (exact.method, exact.tokens) == (("exact", 2) if fallback else ("none", 0))
