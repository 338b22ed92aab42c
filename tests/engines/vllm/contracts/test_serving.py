"""What the connector promises one request, on the model of integers with vLLM's own scheduler. Each answer is that of full computation:
`ask` sees to it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import BLOCK, ROW, Asked, ToyEngine, answer
from vllm_harness import segments, spoil, tokens

from dejakv.cache import HierarchicalCache
from dejakv.store.open import open_store
from dejakv.store.store import Store

A, B = tokens(100, 1), tokens(90, 2)
Start = Callable[..., ToyEngine]


def ask(engine: ToyEngine, prompt: list[int], *, fresh: bool = True, **options: Any) -> Asked:
    """One request; `fresh`: nothing of the prompt is in vLLM's own cache."""
    if fresh:
        engine.forget()
    asked = engine.ask(prompt, **options)
    assert asked.tokens == answer(prompt, asked.count, asked.weight)
    return asked


def method(engine: ToyEngine, prompt: list[int], **options: Any) -> str:
    return ask(engine, prompt, **options).told["method"]


@pytest.mark.parametrize("increments", [False, True])
@pytest.mark.parametrize("length", [17, 31, 32, 33, 100, 200])
@pytest.mark.parametrize("count", [1, 20])
def test_a_prompt_is_computed_once(toy: Start, length: int, increments: bool, count: int) -> None:
    """Also where its first tokens are stored while the others are computed, and where the request is over before the last ones are."""
    extra = {"max_pending_bytes": 16 * BLOCK * ROW} if increments else {}
    engine, prompt = toy(extra), tokens(length, 3)
    first = ask(engine, prompt, count=count)
    assert (first.told["method"], first.computed) == ("none", length + count - 1)
    again = ask(engine, prompt, count=count)
    assert (again.told["method"], again.told["level"], again.computed) == ("exact", "exact_text", count)
    assert (again.told["tokens_reused"], again.told["bytes_loaded"]) == (length - 1, (length - 1) * ROW)


def test_a_common_prefix_is_computed_once(toy: Start) -> None:
    engine = toy({})
    ask(engine, A)
    for prompt, common in ((A + B, 100), (A[:50], 49), (A[:64] + B, 64), (A[:60] + B, 60)):
        asked = ask(engine, prompt, no_store=True)
        assert (asked.told["level"], asked.told["tokens_reused"]) == ("prefix", common), prompt
        assert asked.computed == len(prompt) - common


def test_what_vllm_holds_itself_is_not_loaded(toy: Start) -> None:
    engine = toy({})
    ask(engine, A[:40])
    ask(engine, A)
    engine.forget()
    ask(engine, A[:40], fresh=False, no_store=True)  # two blocks of it lie in vLLM's own cache now
    asked = ask(engine, A, fresh=False)
    assert (asked.told["tokens_reused"], asked.computed) == (len(A) - 1 - 2 * BLOCK, 1)
    again = ask(engine, A, fresh=False)
    assert (again.told["method"], again.told["reason"].split(",")[0]) == (
        "none",
        "3 tokens beyond vLLM's own prefix hit",
    )


def test_partitions_do_not_see_each_other(toy: Start) -> None:
    engine = toy({})
    ask(engine, A, salt="one")
    for other in ("two", None, "one ", "default"):
        asked = ask(engine, A, salt=other, no_store=True)
        assert (asked.told["method"], asked.computed) == ("none", len(A))
    assert method(engine, A, salt="one") == "exact"


def test_off_is_off_and_what_is_not_to_be_kept_is_not(toy: Start) -> None:
    engine = toy({})
    ask(engine, A, no_store=True)
    assert method(engine, A) == "none"
    off = ask(engine, A, mode="off")
    assert (off.told["method"], off.told["reason"], off.computed) == ("none", "mode is off", len(A))
    assert method(engine, A) == "exact"


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"mode": "fuzzy"}, "unknown mode 'fuzzy'"),
        ({"mode": "blend"}, "mode 'blend' is not allowed here"),
        ({"threshold": 1.5}, "threshold 1.5 is no share of a prompt"),
        ({"threshold": -0.1}, "threshold -0.1 is no share of a prompt"),
        ({"threshold": "high"}, "threshold 'high' is no share of a prompt"),
        ({"no_store": "yes"}, "no_store 'yes' is neither true nor false"),
        ({"ttl": 0}, "ttl 0 is no time"),
        ({"donor": "a"}, "unknown field 'donor'"),
        ({"donors": [7]}, "donors is no list of strings"),
        ({"donors": ["a"] * 17}, "17 donors: the server takes state of at most blend_donors=16"),
        ({"partition": "two"}, "unknown field 'partition'"),
    ],
)
def test_a_choice_that_cannot_be_read_is_a_miss(toy: Start, wish: dict[str, Any], reason: str) -> None:
    """Answered, told why, and nothing of it is stored."""
    engine = toy({})
    asked = ask(engine, A, **wish)
    assert asked.told["method"] == "none"
    assert asked.told["reason"].startswith(reason)
    assert method(engine, A) == "none"


@pytest.mark.parametrize(
    ("extra", "stored"),
    [
        ({"min_tokens": 101}, False),
        ({"max_bytes": 99 * ROW}, False),
        ({"min_gain": 100}, False),
        ({"min_gain": 99}, True),
        ({"ttl": 0.2}, False),
    ],
)
def test_settings_decide_what_is_reused(toy: Start, extra: dict[str, Any], stored: bool) -> None:
    engine = toy(extra)
    ask(engine, A)
    engine.settle()
    time.sleep(extra.get("ttl", 0))
    assert (method(engine, A) == "exact") == stored


def test_a_request_shortens_its_lifetime(toy: Start) -> None:
    engine = toy({"ttl": 60})
    ask(engine, A, ttl=0.3)
    ask(engine, B, ttl=500)
    engine.settle()
    time.sleep(0.3)
    assert [method(engine, prompt, no_store=True) for prompt in (A, B)] == ["none", "exact"]


def test_a_prompt_may_have_to_come_twice_before_it_is_stored(toy: Start) -> None:
    engine = toy({"second_sight": True})
    assert [method(engine, A) for _ in range(3)] == ["none", "none", "exact"]


def test_what_was_evicted_is_stored_when_it_comes_again(toy: Start, tmp_path: Path) -> None:
    """A store with room for one prompt of the two."""
    engine = toy({"store_dir": str(tmp_path), "max_bytes": 150 * ROW})
    assert [method(engine, prompt) for prompt in (A, B, A, A)] == ["none", "none", "none", "exact"]


def test_a_conversation_stores_what_is_new_of_each_turn(toy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store holds is not given to it again, but for the rest of a block."""
    engine, put, given = toy({}, prefix=False), Store.put, list[tuple[int, int]]()
    monkeypatch.setattr(
        Store,
        "put",
        lambda store, stored_state: given.append((stored_state.first, stored_state.stop)) or put(store, stored_state),
    )
    prompt = tokens(80, 100)
    for length, turn in ((80, (0, 80)), (130, (80, 130)), (160, (128, 160))):
        prompt = [*prompt, *tokens(length - len(prompt), length)]
        asked = ask(engine, prompt, fresh=False)
        engine.settle()
        assert asked.told["tokens_reused"] == given[-1][0] + (2 if length == 160 else 0)
        assert given[-1] == turn


def test_an_aborted_prompt_is_found_as_far_as_it_was_computed(toy: Start) -> None:
    """An increment of it was stored, and serves a longer prompt."""
    engine, prompt = toy({"max_pending_bytes": 8 * BLOCK * ROW}, budget=32), tokens(200, 3)
    name = engine.add(prompt, count=4)
    while engine.runner.computed[name] < 128:
        engine.step()
    engine.abort(name)
    engine.forget()
    asked = ask(engine, [*prompt, *B[:20]], fresh=False)
    assert (asked.told["level"], asked.told["tokens_reused"]) == ("prefix", 64)


def test_behind_a_short_stored_beginning_steps_are_full(toy: Start) -> None:
    """Most of the prompt is computed as any other is."""
    engine = toy({"min_gain": 1}, budget=128)
    ask(engine, A[:32])
    engine.forget()
    name = engine.add([*A[:32], *tokens(170, 9)], count=1)
    while not engine.arrived:
        engine.step()
    beside = engine.add(B[:20], count=1, no_store=True)
    while not engine.runner.computed[name]:
        engine.step()
    assert engine.runner.computed[name] + engine.runner.computed[beside] == 128
    engine.drain()
    assert engine.asked[name].told["tokens_reused"] == 32


def test_a_slow_store_is_not_waited_for(toy: Start, held: Any) -> None:
    engine = toy({}, prefix=False)
    go = held("put")
    ask(engine, A, fresh=False)
    assert method(engine, A, fresh=False, no_store=True) == "none"
    go.set()
    engine.settle()
    assert method(engine, A, fresh=False) == "exact"


def test_a_load_that_takes_too_long_is_a_miss(toy: Start, held: Any) -> None:
    engine = toy({"load_timeout_s": 0.2})
    ask(engine, A)
    engine.forget()
    held("get_parts")
    asked = ask(engine, A, fresh=False)
    assert (asked.told["method"], asked.told["reason"]) == ("none", "the load took too long: 0.2 s")


def test_a_lookup_that_takes_too_long_is_a_miss(toy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy({"lookup_timeout_s": 0.1})
    ask(engine, A)
    go, find = threading.Event(), HierarchicalCache.find
    monkeypatch.setattr(HierarchicalCache, "find", lambda *given: (go.wait(60), find(*given))[1])
    late = ask(engine, A)
    go.set()
    assert late.told["reason"] == "the lookup took longer than 0.1 s"


def test_an_error_in_a_lookup_is_a_miss(toy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy({})
    monkeypatch.setattr(HierarchicalCache, "find", lambda *_: 1 / 0)
    assert ask(engine, A).told["reason"] == "the lookup failed: ZeroDivisionError"


@pytest.mark.parametrize("most", [40, 110])
def test_saves_behind_a_store_that_hangs_are_dropped(toy: Start, held: Any, most: int) -> None:
    """The engine goes on, no block is kept longer than is needed, and what was taken is stored in the end: of a prompt that is larger its
    first blocks."""
    engine = toy({"max_pending_bytes": most * ROW})
    ask(engine, tokens(20, 9))
    engine.settle()
    go = held("put")
    for number in range(3):
        engine.add(tokens(100, 20 + number), no_store=number == 2)
    while any(not asked.over for asked in engine.asked.values()):
        engine.step()
    engine.step()  # the save of the one that was over last is ordered in the step behind it
    go.set()
    engine.settle()
    found = [ask(engine, tokens(100, 20 + number), no_store=True).told["tokens_reused"] for number in range(3)]
    assert sorted(found) == [0, 0, 32 if most == 40 else 99]


def test_an_increment_that_is_not_stored_leaves_a_prefix(toy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy({"max_pending_bytes": 8 * BLOCK * ROW})
    put = Store.put
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", lambda store, stored_state: stored_state.first < 64 and put(store, stored_state))
        ask(engine, A)
        engine.forget()
    asked = ask(engine, A)
    assert (asked.told["level"], asked.told["tokens_reused"]) == ("prefix", 64)
    assert ask(engine, A).told["level"] == "exact_text"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_no_memory_for_a_copy_costs_the_save(
    toy: Start, error: Exception, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause is in the log. What is no lack of memory is not hidden."""
    engine = toy({})

    def fail(*_given: Any, **_options: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", fail)
        ask(engine, A, count=4)
        engine.settle()
    assert "no memory to copy the state of a prompt of 100 tokens" in caplog.text
    assert [method(engine, A) for _ in range(2)] == ["none", "exact"]
    error = IndexError("a fault of ours")
    monkeypatch.setattr(torch, "index_select", fail)
    with pytest.raises(IndexError, match="a fault of ours"):
        engine.ask(B, count=4)


@pytest.mark.parametrize("damage", ["changed", "deleted", "emptied", "all gone"])
def test_state_that_cannot_be_read_is_a_miss(toy: Start, tmp_path: Path, damage: str) -> None:
    """And it is stored again."""
    engine = toy({"store_dir": str(tmp_path), "memory_bytes": 0})
    ask(engine, A)
    engine.forget()
    for path in segments(tmp_path):
        if damage == "changed":
            spoil(path)
        elif damage == "emptied":
            path.write_bytes(b"")
        else:
            path.unlink()
    asked = ask(engine, A, fresh=False)
    assert asked.told["method"] == "none"
    assert "gone or cannot be read" in asked.told["reason"]
    assert [method(engine, A) for _ in range(2)][-1] == "exact"


def test_what_another_process_stores_is_found(toy: Start, tmp_path: Path) -> None:
    ask(toy({"store_dir": str(tmp_path / "theirs")}), A)
    engine = toy({"store_dir": str(tmp_path / "ours"), "refresh_s": 0.05})
    theirs, ours = open_store(tmp_path / "theirs"), open_store(tmp_path / "ours")
    for meta in theirs.metas():
        stored_state = theirs.get(meta.id)
        assert stored_state is not None
        ours.put(stored_state)
    while method(engine, A, no_store=True) == "none":
        time.sleep(0.05)
    theirs.close()
    ours.close()


def test_switched_off_it_neither_looks_up_nor_stores(
    toy: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`DEJAKV_OFF=1` (tests/test_switched_off.py has the other faces): what was stored before stays, and a start without it finds it."""
    extra = {"store_dir": str(tmp_path / "store"), "memory_bytes": 0}
    engine = toy(extra)
    ask(engine, A)
    engine.forget()
    monkeypatch.setenv("DEJAKV_OFF", "1")
    engine = toy(extra)
    for prompt in (A, B, B):
        told = ask(engine, prompt).told
        assert (told["method"], told["reason"]) == ("none", "switched off: DEJAKV_OFF=1")
    engine.forget()
    monkeypatch.delenv("DEJAKV_OFF")
    engine = toy(extra)
    assert [method(engine, prompt, no_store=True) for prompt in (A, B)] == ["exact", "none"]
