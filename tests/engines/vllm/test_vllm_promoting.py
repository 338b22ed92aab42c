"""Blended prompts that are computed exactly in idle time: which and when without an engine, and what comes of it in a real one."""

import time
from collections import Counter
from typing import Any

from vllm_harness import EXTENSION, Engine, running, tokens, worker_side

from dejakv.engines.vllm.promoting import IDLE_S, Promoting

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
        deadline = time.monotonic() + 60
        while not engine.core.scheduler.running:
            assert time.monotonic() < deadline
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
