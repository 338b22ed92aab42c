"""Loads through a real engine: one read serves all that want it, and blends wait for memory instead of taking more."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from vllm_harness import EXTENSION, running, tokens, worker_side

from dejakv.engines.vllm.reads import Reads

A = tokens(501, 201)
PREAMBLE = tokens(320, 202)


class Slow:
    """A store whose reads wait to be let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go = threading.Event()
        self.read: list[str] = []

    def get(self, id: str) -> Any:
        self.read.append(id)
        assert self.go.wait()
        if self.error is not None:
            raise self.error
        return f"chunk {id}"


def read_by(reads: Reads, count: int, id: str = "a") -> list[Any]:
    """What threads get that read at the same time; then all of them are done."""
    got: list[Any] = []

    def one() -> None:
        try:
            got.append(reads.read(id))
        except OSError as error:
            got.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    reads._store.go.set()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")])
def test_reads_of_one_chunk_are_one(error: Exception | None) -> None:
    store = Slow(error)
    reads = Reads(store)
    reads.expect(["a"] * 5)
    assert read_by(reads, 4) == [("chunk a",) if error is None else "the disk is gone"] * 4
    assert store.read == ["a"]
    if error is None:
        assert reads.read("a") == ("chunk a",)  # the fifth comes late, and is expected
        assert store.read == ["a"]
    reads.done(["a"] * 5)
    assert not reads._reads
    assert not reads._expected


def test_nothing_is_held_that_nobody_expects() -> None:
    store = Slow()
    store.go.set()
    reads = Reads(store)
    for _ in range(2):
        reads.expect(["a"])
        reads.read("a")
        assert not reads._reads
        reads.done(["a"])
    assert store.read == ["a", "a"]


def counted(store: Any) -> list[str]:
    """The ids of which exact loads ask for rows from now on; each read takes a moment."""
    read: list[str] = []
    real = store.get_parts

    def get_parts(id: str, rows: Any = None) -> Any:
        read.append(id)
        time.sleep(0.3)
        return real(id, rows)

    store.get_parts = get_parts
    return read


def test_loads_of_one_chunk_are_merged() -> None:
    """Eight prompts with one preamble, asked together."""
    prompts = [PREAMBLE + tokens(40, 210 + number) for number in range(8)]
    with running(extra={"min_new_tokens": 100}) as engine:
        engine.ask([PREAMBLE + tokens(8, 209)])
        engine.settle()
        engine.reset_prefix_cache()
        read = counted(worker_side().store)
        outputs = engine.ask(prompts)
        assert all(output.told["method"] == "exact" for output in outputs)
        assert 0 < len(read) < 4
        assert not worker_side().loads._reads._expected


def test_blends_wait_for_memory() -> None:
    """Room for one draft: a burst of blends is run one after the other, and all are answered."""
    settings = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "max_pending_bytes": 1}
    moved = [tokens(20, 220 + number) + A[100:] for number in range(4)]
    with running(extra=settings, worker_extension_cls=EXTENSION) as engine:
        engine.ask([A])
        engine.settle()
        loads, most = worker_side().loads, 0
        fetch = loads._fetch

        def fetched(load: Any) -> Any:
            nonlocal most
            most = max(most, sum(item.fetched is not None for item in loads._loading))
            return fetch(load)

        loads._fetch = fetched
        outputs = engine.ask(moved, wish={"mode": "blend", "no_store": True})
        assert [output.told["method"] for output in outputs] == ["blend"] * 4
        assert most <= 1


def test_blends_keep_to_the_token_budget() -> None:
    """Prompts that need more rows than a step may compute, and that come together: every step computes a part, whole prompts
    beside them go on, and the answers are those of one step for all."""
    settings = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0}
    moved = [tokens(20, 230 + number) + A[100:] for number in range(3)]
    with running(extra=settings, worker_extension_cls=EXTENSION, max_num_batched_tokens=256) as engine:
        wish = {"mode": "off", "no_store": True}
        truth = [engine.ask([prompt], wish=wish, salt="truth")[0].tokens for prompt in [*moved, tokens(300, 240)]]
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        blender, computed = worker_side().blender, []
        blender.config = replace(blender.config, share=1.0)
        advance = blender.advance

        def watched(blends: Any, room: int) -> int:
            computed.append((room, advance(blends, room)))
            return computed[-1][1]

        blender.advance = watched
        blend = {"mode": "blend", "no_store": True}
        outputs = engine.ask([*moved, tokens(300, 240)], wish=[blend, blend, blend, wish])
        assert [output.told["method"] for output in outputs] == ["blend"] * 3 + ["none"]
        assert [output.tokens for output in outputs] == truth
        assert all(rows <= room <= 256 for room, rows in computed)
        assert sum(rows for _, rows in computed) == sum(len(prompt) - 16 for prompt in moved)
        assert len(computed) > 3
        assert not worker_side().loads._loading


def test_a_blend_that_takes_too_long_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its rows are there when its time is over: a miss with the reason, and nothing of it is used."""
    settings = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "load_timeout_s": 60.0}
    moved = tokens(20, 230) + A[100:]
    with running(extra=settings, worker_extension_cls=EXTENSION, max_num_batched_tokens=256) as engine:
        wish = {"mode": "off", "no_store": True}
        (truth,) = engine.ask([moved], wish=wish, salt="truth")
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        loads, blender = worker_side().loads, worker_side().blender
        blender.config = replace(blender.config, share=1.0)
        advance = blender.advance

        def late(blends: Any, room: int) -> int:
            for item in loads._loading:
                item.deadline = 0.0
            return advance(blends, room)

        monkeypatch.setattr(blender, "advance", late)
        (output,) = engine.ask([moved], wish={"mode": "blend", "no_store": True})
        assert "the load took longer than 60 s" in output.told["reason"]
        assert not output.told["approximate"]
        assert output.tokens == truth.tokens
