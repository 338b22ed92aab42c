"""Preempted blends, in a real engine: they may be blended again, are labelled either way, and no exact request finds their state."""

from typing import Any

import pytest
from vllm_harness import BLENDING, Engine, changed, greedy, running, tokens, worker_side

BASE = tokens(400, 61)
NEAR = changed(BASE, 0.1, 62)


@pytest.fixture(scope="module")
def engine() -> Any:
    with running(extra=BLENDING) as started:
        yield started


def asked(
    engine: Engine, name: str, prompt: list[int], preempted_at: int, **wish: Any
) -> tuple[list[int], dict[str, Any]]:
    """Tokens and told of a request whose blocks are taken away in the step after so many tokens of its answer; 0: never."""
    llm, taken = engine.llm.llm_engine, not preempted_at
    llm.add_request(name, {"prompt_token_ids": prompt}, greedy(12, **wish))
    made: Any = None
    while llm.has_unfinished_requests():
        for output in llm.step():
            made = output
        if not taken and made is not None and len(made.outputs[0].token_ids) >= preempted_at:
            taken = engine.llm.reset_prefix_cache(reset_running_requests=True)
    return list(made.outputs[0].token_ids), made.kv_transfer_params["dejakv"]


@pytest.mark.parametrize("preempted_at", [1, 5])
def test_a_preempted_blend_is_labelled_and_poisons_nothing(engine: Engine, preempted_at: int) -> None:
    truth = engine.ask([NEAR], wish={"mode": "off", "no_store": True}, max_tokens=12, salt="truth")[0].tokens
    engine.ask([BASE])
    engine.settle()
    engine.reset_prefix_cache()
    _, told = asked(engine, f"blend-{preempted_at}", NEAR, preempted_at, mode="blend", no_store=True)
    assert told["approximate"]
    assert told["method"] == "blend", told["reason"]
    assert 0 < told["tokens_reused"] < len(NEAR)
    exact, told = asked(engine, f"exact-{preempted_at}", NEAR, 0, mode="exact", no_store=True)
    assert not told["approximate"]
    assert exact == list(truth)


def test_what_was_exact_stays_exact_when_it_is_preempted(engine: Engine) -> None:
    """Though it asked for a blend, and there is something to blend by now."""
    prompt, count = tokens(300, 75), 120
    donor, wish = changed(prompt, 0.1, 71), {"mode": "blend", "no_store": True}
    (truth,) = engine.ask([prompt], wish={"mode": "off", "no_store": True}, max_tokens=count, salt="truth")
    llm, side, late = engine.llm.llm_engine, engine.connector.scheduler_side, list[Any]()

    def step() -> None:
        late.extend(output for output in llm.step() if output.request_id == "late")

    llm.add_request("late", {"prompt_token_ids": prompt}, greedy(count, **wish))
    while not late:
        step()
    llm.add_request("donor", {"prompt_token_ids": donor}, greedy(1))
    step()
    while len(side.requests) > 1 or side.saves.pending:
        step()
        worker_side().saver.flush(10)
    assert not late[-1].finished
    engine.llm.reset_prefix_cache(reset_running_requests=True)
    while llm.has_unfinished_requests():
        step()
    assert not late[-1].kv_transfer_params["dejakv"]["approximate"]
    assert tuple(late[-1].outputs[0].token_ids) == truth.tokens
    engine.reset_prefix_cache()
    (blend,) = engine.ask([prompt], wish=wish)
    assert blend.told["approximate"], "there was something to blend"
