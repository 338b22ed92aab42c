"""Blends in a full server: in which step each request has its first token, with blends and without.

Steps are counted. Lookups, reads and drafts are made in threads, and are given the time for that: they are much faster than a step of a real
model.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_harness import EXTENSION, Engine, greedy, running, tokens, worker_side

from dejakv.engines.vllm.blend.queue import CUT, BlendQueue
from dejakv.engines.vllm.scheduler import NO_GAIN, SchedulerSide
from dejakv.engines.vllm.transfers.loads import LoadRunner
from dejakv.store.store import Store

BUDGET, BLENDS, AHEAD = 2048, 12, 3
DONORS = [tokens(700, 900 + number) for number in range(4)]
PROMPTS = [tokens(20, number) + DONORS[number % 4][40:] + tokens(24, 500 + number) for number in range(BLENDS)]
SETTINGS = {"modes": ["off", "exact", "blend"]}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(
        extra=SETTINGS, worker_extension_cls=EXTENSION, max_num_batched_tokens=BUDGET, max_num_seqs=64
    ) as started:
        started.ask(DONORS)
        started.ask(
            [PROMPTS[0]], wish={"mode": "blend", "no_store": True}
        )  # the model is checked before the first blend
        yield started


@pytest.fixture
def threads_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = LoadRunner.finish

    def finished(loads: LoadRunner, *given: Any) -> Any:
        for item in loads._loading:
            if item.fetched is not None:
                item.fetched.result(60)
        return finish(loads, *given)

    monkeypatch.setattr(LoadRunner, "finish", finished)


@contextmanager
def counting(engine: Engine) -> Iterator[list[int]]:
    """Adds the tokens that the model computes to the last number of a list."""
    counted: list[int] = []
    hook = engine.core.model_executor.driver_worker.worker.model_runner.get_model().register_forward_pre_hook(
        lambda _model, _given, named: counted.append(counted.pop() + named["positions"].shape[-1]), with_kwargs=True
    )
    try:
        yield counted
    finally:
        hook.remove()


def queued(engine: Engine, mode: str, misses: int, salt: str) -> tuple[dict[str, int], dict[str, Any], list[int]]:
    """All prompts at once, some misses ahead and so many behind each that can be blended. Returns the step of each one's first token, what
    each was told, and the tokens of each step."""
    engine.settle()
    engine.reset_prefix_cache()
    llm, side, first, told = engine.llm.llm_engine, engine.connector.scheduler_side, dict[str, int](), dict[str, Any]()
    for number in range(AHEAD):
        ids = {"prompt_token_ids": tokens(1000, 2000 + number)}
        llm.add_request(f"{salt}ahead-{number}", ids, greedy(1, mode="off", no_store=True))
    for number in range(BLENDS):
        ids = {"prompt_token_ids": PROMPTS[number]}
        llm.add_request(f"{salt}blend-{number}", ids, greedy(1, mode=mode, no_store=True))
        for each in range(misses):
            prompt = tokens(700, 1000 + 10 * number + each)
            name = f"{salt}miss-{number}-{each}"
            llm.add_request(name, {"prompt_token_ids": prompt}, greedy(1, mode="off", no_store=True))
    for tracked in side.requests.values():
        tracked.lookup.result(60)
    with counting(engine) as counted:
        while llm.has_unfinished_requests():
            counted.append(0)
            for output in llm.step():
                if output.outputs[0].token_ids:
                    name = output.request_id.removeprefix(salt)
                    first.setdefault(name, len(counted))
                    told[name] = output.kv_transfer_params["dejakv"]
    assert len(worker_side().loads) == 0
    return first, told, counted


@pytest.mark.parametrize("misses", [4, 1, 0])
def test_nobody_is_later_than_with_full_computation(engine: Engine, threads_in_time: None, misses: int) -> None:
    """No request, blended or not, in any backlog; and no step computes more than its budget. Time is tokens computed, and a step takes as long as
    `CUT` at least. All blends are made, and the burst is over sooner."""
    refused = engine.metrics().get("vllm:dejakv_blends_refused", 0)
    without, _, full = queued(engine, "off", misses, f"off{misses}-")
    first, told, steps = queued(engine, "blend", misses, f"on{misses}-")
    done, done_full = (
        list(accumulate((max(CUT, each) if each else 0 for each in of), initial=0)) for of in (steps, full)
    )
    assert not {name: (step, without[name]) for name, step in first.items() if done[step] > done_full[without[name]]}
    assert done[-1] < done_full[-1]
    assert sum(done[step] for step in first.values()) < sum(done_full[step] for step in without.values())
    assert max(steps) <= BUDGET
    assert [one["method"] for name, one in told.items() if name.startswith("blend")] == ["blend"] * BLENDS
    assert engine.metrics().get("vllm:dejakv_blends_refused", 0) == refused


def test_who_comes_while_a_blend_is_made_leaves_it_a_short_step(engine: Engine, threads_in_time: None) -> None:
    """The step that made it had room for all, so that nothing was kept free for the one behind it."""
    engine.settle()
    engine.reset_prefix_cache()
    llm, side = engine.llm.llm_engine, engine.connector.scheduler_side
    llm.add_request("share", {"prompt_token_ids": PROMPTS[0]}, greedy(1, mode="blend", no_store=True))
    while not any(tracked.load_result for tracked in side.requests.values()):
        assert llm.step() == []
    for number in range(2):
        ids = {"prompt_token_ids": tokens(1000, 4000 + number)}
        llm.add_request(f"beside-{number}", ids, greedy(1, mode="off", no_store=True))
    for tracked in side.requests.values():
        tracked.lookup.result(60)
    with counting(engine) as counted:
        counted.append(0)
        assert [output.request_id for output in llm.step()] == ["share"]
        assert counted.pop() < CUT
    stepped_to_the_end(llm)


def test_a_server_that_is_never_idle_checks_the_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the check takes more rows than the blend itself, as at the quality `loose`, and donors are read for longer than a step."""
    engine.settle()
    engine.reset_prefix_cache()
    blender = worker_side().blend_runner
    assert blender is not None
    blender.model_check = replace(blender.model_check, checked=0, _moves_verified=False)
    monkeypatch.setattr(blender, "config", replace(blender.config, selector="similarity", share=0.0, tail=16))
    llm, answered, read, there = engine.llm.llm_engine, list[str](), Store.get_parts, threading.Event()
    monkeypatch.setattr(Store, "get_parts", lambda *given: there.wait(60) and read(*given))
    prompt = tokens(8, 5000) + DONORS[1][40:] + tokens(16, 5001)
    llm.add_request("short", {"prompt_token_ids": prompt}, greedy(1, mode="blend", no_store=True))
    for number in range(40):
        ids = {"prompt_token_ids": tokens(1000, 5100 + number)}
        llm.add_request(f"beside-{number}", ids, greedy(1, mode="off", no_store=True))
    for tracked in engine.connector.scheduler_side.requests.values():
        tracked.lookup.result(60)
    told = {}
    while llm.has_unfinished_requests():
        if len(answered) == 3 and not there.is_set():
            there.set()
            for item in worker_side().loads._loading:
                item.fetched.result(60)
        for output in llm.step():
            answered.append(output.request_id)
            told[output.request_id] = output.kv_transfer_params["dejakv"]
    assert (told["short"]["method"], blender.model_check.checked > 0) == ("blend", True), told["short"]
    assert answered.index("short") < 12


def test_donors_that_are_read_slowly_hold_nobody_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are full of other prompts meanwhile, and the blends are not thrown away."""
    engine.settle()
    engine.reset_prefix_cache()
    llm, side, read, there = engine.llm.llm_engine, engine.connector.scheduler_side, Store.get_parts, threading.Event()
    monkeypatch.setattr(Store, "get_parts", lambda *given: there.wait(60) and read(*given))
    for number in range(4):
        llm.add_request(f"slow-{number}", {"prompt_token_ids": PROMPTS[number]}, greedy(1, mode="blend", no_store=True))
    for number in range(30):
        ids = {"prompt_token_ids": tokens(700, 3000 + number)}
        llm.add_request(f"beside-{number}", ids, greedy(1, mode="off", no_store=True))
    for tracked in side.requests.values():
        tracked.lookup.result(60)
    answered, told = set[str](), list[str]()
    with counting(engine) as counted:
        while llm.has_unfinished_requests():
            counted.append(0)
            for output in llm.step():
                answered.add(output.request_id)
                told += [output.kv_transfer_params["dejakv"]["method"]] if output.request_id.startswith("slow") else []
            if sum(name.startswith("beside") for name in answered) == 30 and not there.is_set():
                filled = len(counted) - 1
                there.set()
    assert sum(count < BUDGET for count in counted[:filled]) <= 1
    assert told.count("blend") >= 2


def test_a_blend_that_does_not_pay_leaves_the_exact_prefix(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is told, the refusal counted, and the answer is that of full computation."""
    engine.settle()
    prompt = DONORS[0][:300] + tokens(20, 600) + DONORS[1][40:] + tokens(24, 601)
    (truth,) = engine.ask([prompt], wish={"mode": "off", "no_store": True}, salt="truth")
    engine.reset_prefix_cache()
    before = engine.metrics().get("vllm:dejakv_blends_refused", 0)
    monkeypatch.setattr(BlendQueue, "_pays", lambda queue, each, *_: not each.rows)
    (refused,) = engine.ask([prompt], wish={"mode": "blend", "no_store": True})
    assert (refused.told["method"], refused.told["reason"]) == ("exact", NO_GAIN)
    assert (refused.told["tokens_reused"], refused.told["approximate"]) == (refused.cached, False)
    assert refused.cached >= 288
    assert refused.tokens == truth.tokens
    assert engine.metrics()["vllm:dejakv_blends_refused"] == before + 1
    (alone,) = engine.ask([PROMPTS[5]], wish={"mode": "blend", "no_store": True})
    assert (alone.told["method"], alone.told["reason"]) == ("none", NO_GAIN), "there is no prefix to take"


def stepped_to_the_end(llm: Any) -> None:
    while llm.has_unfinished_requests():
        llm.step()


@pytest.mark.parametrize(
    ("kind", "name"), [(KVCacheManager, "allocate_slots"), (SchedulerSide, "plan_step"), (BlendQueue, "share_out")]
)
def test_the_budget_is_the_servers_again_after_an_error(
    engine: Engine, threads_in_time: None, kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM or the connector, while it is lowered. The engine goes on, and its next step has all of it."""
    engine.settle()
    engine.reset_prefix_cache()
    llm, scheduler, side = engine.llm.llm_engine, engine.core.scheduler, engine.connector.scheduler_side
    real, seen = getattr(kind, name), list[int]()

    def failing(*given: Any, **named: Any) -> Any:
        seen.append(scheduler.max_num_scheduled_tokens)
        if seen[-1] < BUDGET or (kind is BlendQueue and side.requests):
            raise RuntimeError("broken")
        return real(*given, **named)

    names = [f"{name}-{number}" for number in range(BLENDS)]
    for number, request_id in enumerate(names):
        llm.add_request(request_id, {"prompt_token_ids": PROMPTS[number]}, greedy(1, mode="blend", no_store=True))
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, failing)
        with pytest.raises(RuntimeError, match="broken"):
            stepped_to_the_end(llm)
    assert kind is BlendQueue or seen[-1] < BUDGET
    assert scheduler.max_num_scheduled_tokens == BUDGET
    llm.abort_request(names)
    engine.settle()
    _, told, steps = queued(engine, "off", 1, f"{name}-after-")
    assert (len(told), steps[0]) == (AHEAD + 2 * BLENDS, BUDGET)
