"""Weights that change under a server, on the model of integers: an answer is that of the weights that compute it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import ToyEngine, answer
from vllm_harness import tokens

from dejakv.store.store import Store

A, B, C = (tokens(100, seed) for seed in (1, 2, 3))


@pytest.fixture
def engine(toy: Callable[..., ToyEngine], tmp_path: Path) -> ToyEngine:
    return toy({"store_dir": str(tmp_path), "memory_bytes": 0, "load_timeout_s": 60})


def methods(engine: ToyEngine, *prompts: list[int]) -> list[str]:
    """How prompts are served when vLLM's own cache is empty. Each must be answered with the weights of now."""
    engine.forget()
    asked = [engine.ask(prompt, no_store=True) for prompt in prompts]
    assert [one.tokens for one in asked] == [answer(prompt, 1, engine.weight) for prompt in prompts]
    return [one.told["method"] for one in asked]


def update(engine: ToyEngine) -> None:
    engine.model.weight[0] += 1


def restore(engine: ToyEngine) -> None:
    engine.model.weight[0] -= 1


def test_state_of_other_weights_is_not_found_until_they_are_back(
    toy: Callable[..., ToyEngine], engine: ToyEngine, tmp_path: Path
) -> None:
    """In this process and in the next one, which must not find what only the other weights have seen."""
    engine.ask(A)
    assert methods(engine, A) == ["exact"]
    update(engine)
    assert engine.reset(connector=True)
    assert methods(engine, A, B) == ["none", "none"]
    for prompt in (A, B):
        engine.ask(prompt, salt="kept")
    engine.forget()
    assert [engine.ask(prompt, salt="kept").told["method"] for prompt in (A, B)] == ["exact", "exact"]
    engine.ask(B)
    restore(engine)
    assert engine.reset(connector=True)
    assert methods(engine, A, B) == ["exact", "none"]
    assert methods(toy({"store_dir": str(tmp_path)}), A, B) == ["exact", "none"]


def test_without_the_extension_a_reset_begins_anew(toy: Callable[..., ToyEngine], tmp_path: Path) -> None:
    """Nobody can say then that the weights are those of the start. What is stored from then on is this process's alone."""
    extra = {"store_dir": str(tmp_path), "memory_bytes": 0}
    engine = toy(extra, extended=False)
    engine.ask(A)
    assert methods(engine, A) == ["exact"]
    assert engine.reset(connector=True)
    assert methods(engine, A) == ["none"]
    for prompt in (A, B):
        engine.ask(prompt)
    assert methods(engine, A, B) == ["exact", "exact"]
    assert methods(toy(extra, extended=False), A, B) == ["exact", "none"]


def test_a_save_under_way_at_a_reset_is_dropped(engine: ToyEngine, held: Any) -> None:
    go = held("put")
    engine.ask(A)
    update(engine)
    assert engine.reset(connector=True)
    go.set()
    assert methods(engine, A) == ["none"]
    restore(engine)
    assert engine.reset(connector=True)
    assert methods(engine, A) == ["none"]


@pytest.mark.parametrize("arrived", [False, True])
def test_a_load_at_a_reset_is_not_used(engine: ToyEngine, held: Any, arrived: bool) -> None:
    """The state is on its way when the weights change; where it has arrived, its request goes on as one that is running does."""
    engine.ask(A)
    engine.forget()
    go = held("get_parts")
    name = engine.add(A)
    while not engine.loading:
        engine.step()
    if arrived:
        go.set()
        while not engine.arrived:
            engine.step()
    update(engine)
    assert not engine.reset(connector=True), "blocks are in use: vLLM's own cache could not be reset"
    go.set()
    engine.drain()
    asked = engine.asked[name]
    if arrived:
        assert asked.told["method"] == "exact"
    else:
        assert (asked.told["method"], asked.tokens) == ("none", answer(A, 1, engine.weight))
        assert "a reset" in asked.told["reason"]
    refused = engine.ask(B)
    assert "reset again" in refused.told["reason"]
    engine.settle()
    assert engine.reset(connector=True)
    assert methods(engine, A, B) == ["none", "none"], "nothing was stored meanwhile"


def in_place(engine: ToyEngine) -> None:
    engine.model.weight[0] += 1


def through_data(engine: ToyEngine) -> None:
    engine.model.weight.data.copy_(engine.model.weight.data + 1)


def another_tensor(engine: ToyEngine) -> None:
    engine.model.weight = torch.nn.Parameter(engine.model.weight + 1, requires_grad=False)


@pytest.mark.parametrize("change", [in_place, through_data, another_tensor])
def test_a_change_without_a_reset_ends_reuse_until_a_reset(
    engine: ToyEngine, change: Callable[[ToyEngine], None]
) -> None:
    """vLLM's own prefix cache still has the old state, so nothing is served or stored."""
    engine.ask(A)
    engine.settle()
    change(engine)
    assert methods(engine, A) == ["none"]
    assert "without a reset" in engine.ask(B).told["reason"]
    engine.settle()
    assert engine.reset(connector=True)
    assert methods(engine, A, B) == ["none", "none"]
    engine.ask(A, salt="kept")
    engine.forget()
    assert engine.ask(A, salt="kept").told["method"] == "exact"


def test_a_change_while_a_prompt_is_computed_that_is_not_stored_is_noticed(engine: ToyEngine) -> None:
    """Its blocks are in vLLM's own cache, and a prompt that is stored would find them."""
    name = engine.add(A, no_store=True)
    while not engine.runner.computed[name]:  # it is looked up first
        engine.step()
    assert engine.runner.computed[name] < len(A)
    update(engine)
    engine.step()
    restore(engine)
    engine.drain()
    engine.ask(A)
    assert methods(engine, A) == ["none"]
    assert engine.reset(connector=True)
    engine.ask(A)
    assert methods(engine, A) == ["exact"]


def test_a_prompt_between_two_updates_is_never_stored(
    engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are gone when its state is copied. Not for a moment: another process could find it."""
    stored: list[tuple[int, ...]] = []
    put = Store.put
    monkeypatch.setattr(
        Store,
        "put",
        lambda store, stored_state: (stored.append(stored_state.meta.token_ids), put(store, stored_state))[1],
    )
    engine.ask(C)
    engine.settle()
    update(engine)
    assert engine.ask(A).tokens == answer(A, 1, engine.weight)
    restore(engine)
    engine.settle()
    assert stored == [tuple(C)]
