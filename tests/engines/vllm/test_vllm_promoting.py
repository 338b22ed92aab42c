"""Blended prompts that are computed exactly in idle time: which and when without an engine, and what comes of it in a real one."""

import json
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_harness import DOCS, EXTENSION, Engine, running, serving, tokens, worker_side

from dejakv.engines.vllm.launch import server_flags
from dejakv.engines.vllm.promoting import IDLE_S, Promoting
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.store.disk import DiskStore

A = tokens(400, 501)
MIXED = tokens(60, 502) + A[100:390]
LATER = tokens(45, 503) + A[120:390]


def counts_of(engine: Engine) -> Counter[str]:
    """What is counted from now on, whoever takes it."""
    counted, counts = Counter[str](), engine.connector.scheduler_side.counts
    add = counts.add

    def noted(name: str, label: str = "", amount: float = 1) -> None:
        counted[name] += 1
        add(name, label, amount)

    counts.add = noted
    return counted


def computed(folder: Path) -> set[tuple[int, ...]]:
    """The prompts whose exact state is in a folder."""
    store = DiskStore(folder)
    try:
        return {tuple(meta.token_ids) for meta in store.metas() if meta.kind == "kv"}
    finally:
        store.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(**options: Any) -> tuple[Promoting, list[tuple[str, str]], Clock]:
    """With what it does to the scheduler."""
    done: list[tuple[str, str]] = []
    clock = Clock()
    promoting = Promoting(
        lambda request, name: done.append(("add", request)),
        lambda name: done.append(("end", name)),
        clock=clock,
        **options,
    )
    return promoting, done, clock


def test_the_newest_prompt_is_computed_when_nothing_has_run_for_a_while() -> None:
    promoting, done, clock = made()
    assert not promoting.pending
    for key in "abc":
        promoting.note(key, f"prompt {key}")
    promoting.step(idle=True)
    clock.now = IDLE_S - 0.01
    promoting.step(idle=True)
    assert done == [], "not at once"
    promoting.step(idle=False)
    clock.now = IDLE_S
    promoting.step(idle=True)
    assert done == [], "something has run"
    clock.now = 2 * IDLE_S
    promoting.step(idle=True)
    assert done == [("add", "prompt c")]
    assert promoting.owns("dejakv-promotion-1")
    promoting.step(idle=True)
    assert len(done) == 1, "one at a time"
    assert promoting.ended("dejakv-promotion-1", aborted=False)
    promoting.step(idle=True)
    assert done[1:] == [("add", "prompt b")]
    assert not promoting.ended("a client's", aborted=False)


def test_a_client_goes_first_and_the_prompt_waits_again() -> None:
    promoting, done, clock = made()
    promoting.note("a", "prompt a")
    promoting.step(idle=True)
    clock.now = IDLE_S
    promoting.step(idle=True)
    promoting.came()
    assert done == [("add", "prompt a"), ("end", "dejakv-promotion-1")]
    assert not promoting.ended("dejakv-promotion-1", aborted=True)
    assert promoting.pending
    promoting.step(idle=True)
    assert len(done) == 2
    clock.now = 2 * IDLE_S
    promoting.step(idle=True)
    assert done[-1] == ("add", "prompt a")


def test_few_prompts_wait_and_none_where_nothing_runs() -> None:
    paused = False
    promoting, done, clock = made(most=2, paused=lambda: paused)
    for key in "abca":
        promoting.note(key, f"prompt {key}")
    assert list(promoting._waiting) == ["c", "a"]
    paused = True
    assert not promoting.pending, "or the engine would go on stepping"
    promoting.step(idle=True)
    clock.now = IDLE_S
    promoting.step(idle=True)
    assert done == []


def test_a_prompt_waits_no_longer_than_its_state_may_be_used() -> None:
    promoting, done, clock = made()
    promoting.note("a", "prompt a", 60.0)
    promoting.note("b", "prompt b")
    promoting.note("c", "prompt c", 1.0)
    promoting.step(idle=True)
    clock.now = 1.0
    while not done:
        promoting.step(idle=True)
    assert done == [("add", "prompt b")], "the newest was too old"
    assert promoting.wish.ttl is None
    promoting.ended("dejakv-promotion-1", aborted=False)
    promoting.step(idle=True)
    clock.now = 20.0
    promoting.came()
    assert promoting.wish == Wish("exact", ttl=40.0)
    promoting.ended("dejakv-promotion-2", aborted=True)
    clock.now = 60.0
    promoting.step(idle=True)
    clock.now = 61.0
    promoting.step(idle=True)
    assert len(done) == 3, "it was ended, and is too old now"
    assert not promoting.pending


@pytest.mark.parametrize("modes", [["off", "exact", "blend"], ["off", "blend"]])
def test_what_idle_time_computes_is_kept_as_its_request_allowed(modes: list[str]) -> None:
    """No longer than the request's own `ttl`, and whatever modes clients may choose."""
    settings = {"mode": "blend", "modes": modes, "blend_max_share": 1.0, "promote": True}
    with running(extra=settings, worker_extension_cls=EXTENSION) as engine:
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        (mixed,) = engine.ask([MIXED], wish={"ttl": 3600})
        assert mixed.told["method"] == "blend"
        engine.settle()
        kept = {tuple(meta.token_ids): meta for meta in worker_side().store.metas() if meta.kind == "kv"}
        assert 0 < kept[tuple(MIXED)].ttl <= 3600
        assert kept[tuple(A)].ttl == 0


def test_a_server_that_is_told_to_end_computes_nothing_for_nobody(tmp_path: Path) -> None:
    """It drains requests for as long as it is told (`--shutdown-timeout`); prompts that wait for idle time do not prolong that."""
    settings = ConnectorSettings(
        store_dir=str(tmp_path / "kv"), modes=("off", "exact", "blend"), blend_max_share=1.0, promote=True
    )
    prompts = [tokens(40, 510 + number) + A[60 + number : 390] for number in range(6)]
    flags = [*server_flags(settings), "--shutdown-timeout", "60"]
    adopt = {"mode": "off", "index_encoder": "model", "model": str(DOCS)}
    environment = {"DEJAKV_ADOPT": json.dumps(adopt), "VLLM_LOGGING_LEVEL": "INFO"}
    with serving(tmp_path, DOCS, flags, environment) as address:

        def ask(prompt: list[int], mode: str) -> str:
            wish = {"kv_transfer_params": {"dejakv": {"mode": mode}}}
            body = {"model": "docs", "prompt": prompt, "max_tokens": 2, "temperature": 0, **wish}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=None)
            return answer.json()["kv_transfer_params"]["dejakv"]["method"]

        ask(A, "exact")
        others = count(600)
        while (
            ask(tokens(40, next(others)) + A[50:390], "blend") != "blend"
        ):  # its state is stored and found a little later
            pass
        assert [ask(prompt, "blend") for prompt in prompts] == ["blend"] * len(prompts)
    assert "EngineCore: request processing complete" in (tmp_path / "log").read_text()
    assert not set(map(tuple, prompts)) <= computed(tmp_path / "kv")


def test_a_blended_prompt_is_an_exact_hit_once_it_was_computed_in_idle_time() -> None:
    """The engine goes on stepping until then; nobody is given the answer of that step, and no lookup is counted."""
    settings = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "promote": True}
    with running(extra=settings, worker_extension_cls=EXTENSION) as engine:
        truth = engine.ask([MIXED, LATER], wish={"mode": "off", "no_store": True}, salt="truth")
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        (mixed,) = engine.ask([MIXED], wish={"mode": "blend"})
        assert mixed.told["method"] == "blend"
        (quiet,) = engine.ask([LATER], wish={"mode": "blend", "no_store": True})
        assert quiet.told["method"] == "blend"
        counted = counts_of(engine)
        assert engine.core.scheduler.has_requests()
        engine.settle()
        assert not engine.connector.scheduler_side.promoting.pending
        assert counted["promotions"] == counted["saves"] == 1
        assert "lookups" not in counted
        stored = {tuple(meta.token_ids) for meta in worker_side().store.metas(partition="default") if meta.kind == "kv"}
        assert tuple(MIXED) in stored
        assert tuple(LATER) not in stored, "it asked for nothing of it to be kept"
        engine.reset_prefix_cache()
        (again,) = engine.ask([MIXED], wish={"mode": "blend"})
        assert (again.told["method"], again.told["level"], again.told["approximate"]) == ("exact", "exact_text", False)
        assert again.tokens == truth[0].tokens


def test_a_request_ends_what_is_computed_for_nobody() -> None:
    """It is answered as ever, and the prompt is computed later."""
    settings = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "promote": True}
    with running(extra=settings, worker_extension_cls=EXTENSION, max_num_batched_tokens=128, max_num_seqs=8) as engine:
        (truth,) = engine.ask([LATER], wish={"mode": "off", "no_store": True}, salt="truth")
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        (mixed,) = engine.ask([MIXED], wish={"mode": "blend", "no_store": False})
        assert mixed.told["method"] == "blend"
        promoting = engine.connector.scheduler_side.promoting
        while not engine.core.scheduler.running:
            engine.core.step_fn()
        (under_way,) = engine.core.scheduler.running
        assert promoting.owns(under_way.request_id)
        assert under_way.num_computed_tokens < len(MIXED), "a part of its prefill"
        (later,) = engine.ask([LATER], wish={"mode": "off", "no_store": True})
        assert later.tokens == truth.tokens
        assert promoting._running is None
        assert promoting.pending
        counted = counts_of(engine)
        engine.settle()
        assert counted["promotions"] == 1
