"""Preempted requests, on the model of integers: what is stored of them is loaded again, and the client is told what became of the last try."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, Asked, ToyEngine, answer
from vllm_harness import segments, tokens, worker_side

A, B = tokens(150, 11), tokens(150, 12)


@pytest.fixture
def engine(toy: Callable[..., ToyEngine], tmp_path: Path) -> ToyEngine:
    return toy({"store_dir": str(tmp_path), "memory_bytes": 0, "load_timeout_s": 60})


def preempted(
    engine: ToyEngine, prompt: list[int], answered: int, then: Callable[[], Any] = lambda: None, **wish: Any
) -> Asked:
    """A request whose blocks are taken away once so many tokens of its answer are out, and the tokens computed from there on."""
    name = engine.add(prompt, count=20, **wish)
    while len(engine.asked[name].tokens) < answered:
        engine.step()
    assert engine.reset(running=True)
    then()
    before = engine.runner.computed[name]
    engine.drain()
    asked = engine.asked[name]
    asked.computed -= before
    assert asked.tokens == answer(prompt, 20, engine.weight)
    return asked


@pytest.mark.parametrize("answered", [1, 2, 7])
@pytest.mark.parametrize("wish", [{}, {"no_store": True}, {"mode": "exact"}])
def test_what_is_stored_is_loaded_again(engine: ToyEngine, answered: int, wish: dict[str, Any]) -> None:
    engine.ask(A)
    engine.forget()
    asked = preempted(engine, A, answered, **wish)
    assert asked.told["method"] == "exact"
    assert asked.told["tokens_reused"] == len(A) - 1
    assert asked.computed == 20, "the prompt's last token, and those of the answer but the last"


def test_a_prompt_that_was_stored_meanwhile_is_loaded(engine: ToyEngine) -> None:
    """Its own state: nothing was stored of it when it came."""
    asked = preempted(engine, A, 5, then=lambda: worker_side().saver.flush(10))
    assert (asked.told["method"], asked.told["tokens_reused"]) == ("exact", len(A) - 1)
    engine.forget()
    assert engine.ask(A).told["method"] == "exact"


def test_what_is_gone_by_then_is_not_counted_as_reused(engine: ToyEngine, tmp_path: Path) -> None:
    engine.ask(A)
    engine.forget()
    asked = preempted(engine, A, 3, then=lambda: [path.unlink() for path in segments(tmp_path)], no_store=True)
    assert (asked.told["method"], asked.told["tokens_reused"], asked.told["bytes_loaded"]) == ("none", 0, 0)
    assert asked.computed == len(A) + 19


def test_who_asked_for_no_reuse_gets_none(engine: ToyEngine) -> None:
    engine.ask(A)
    engine.forget()
    asked = preempted(engine, A, 3, mode="off")
    assert (asked.told["method"], asked.told["reason"], asked.computed) == ("none", "mode is off", len(A) + 19)


def test_after_a_change_of_weights_nothing_old_is_loaded(engine: ToyEngine) -> None:
    """A request of before the change is computed in full, in its second try too."""
    engine.ask(A)
    engine.forget()
    name = engine.add(A, count=20)
    while not engine.asked[name].tokens:
        engine.step()
    engine.model.weight[0] += 1
    assert engine.reset(running=True, connector=True)
    engine.drain()
    told = engine.asked[name].told
    assert (told["method"], told["tokens_reused"]) == ("none", 0)
    engine.settle()
    engine.forget()
    assert engine.ask(A).told["method"] == "none"


@pytest.mark.parametrize("seed", range(6))
def test_too_few_blocks_for_all(toy: Callable[..., ToyEngine], tmp_path: Path, seed: int) -> None:
    """vLLM's own preemptions: no answer is wrong, and no more is told than was loaded or computed in the last try."""
    rng = random.Random(seed)
    blocks = 1 + 2 * len(A) // BLOCK + rng.randrange(6)
    engine = toy({"store_dir": str(tmp_path), "load_timeout_s": 60}, blocks=blocks, prefix=False)
    prompts = [A, B, A[:90], B[:70] + A[:40]]
    for prompt in prompts:
        engine.ask(prompt)
    engine.forget()
    made: dict[str, Any] = {}
    for _ in range(3):
        for prompt in rng.sample(prompts, 4):
            name = engine.add(prompt, count=40, salt=rng.choice([None, None, "other"]))
            made[name] = engine.scheduler.requests[name]
        engine.drain()
    assert sum(request.num_preemptions for request in made.values()) > 0
    again = [name for name, request in made.items() if request.num_preemptions]
    for name in made:
        asked = engine.asked[name]
        assert asked.tokens == answer(asked.prompt, 40, engine.weight)
        assert asked.told["tokens_reused"] <= len(asked.prompt) - 1
    assert any(engine.asked[name].told["tokens_reused"] for name in again)
