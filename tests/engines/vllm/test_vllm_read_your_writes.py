"""The same prompt again as soon as its answer is there: its state is found, though it is still being saved."""

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from vllm_harness import Engine, running, tokens, worker_side

COUNT = 12
"""Prompts of each kind. All but the last test's are too short to tell how long computing takes, so that they wait for their state as long
as any lookup may take, however busy the machine is."""


@pytest.fixture(scope="module", params=["disk", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One whose own prefix cache is off, so that nothing but the store serves."""
    extra: dict[str, Any] = {"store_dir": str(tmp_path_factory.mktemp("kv"))} if request.param == "disk" else {}
    with running(extra=extra, enable_prefix_caching=False) as started:
        yield started


@pytest.mark.parametrize("answer", [1, 6])
def test_a_prompt_again(engine: Engine, answer: int) -> None:
    for number in range(COUNT):
        prompt = tokens(200, 1000 * answer + number)
        (first,) = engine.ask([prompt], max_tokens=answer)
        (again,) = engine.ask([prompt], max_tokens=answer)
        assert (again.told["method"], again.told["tokens_reused"]) == ("exact", 199), (number, again.told)
        assert again.tokens == first.tokens


@pytest.mark.parametrize("answer", [1, 6])
def test_a_conversation_that_goes_on(engine: Engine, answer: int) -> None:
    for number in range(COUNT):
        prompt = tokens(180, 3000 + 1000 * answer + number)
        (first,) = engine.ask([prompt], max_tokens=answer)
        (longer,) = engine.ask([[*prompt, *first.tokens, *tokens(40, number)]], max_tokens=answer)
        assert (longer.told["method"], longer.told["tokens_reused"]) == ("exact", 180), (number, longer.told)


def test_several_clients_at_once(engine: Engine) -> None:
    """Each asks its own prompt a second time, all together."""
    prompts = [tokens(40, 70_000 + number) for number in range(6)]
    engine.ask(prompts, max_tokens=1)
    again = engine.ask(prompts, max_tokens=1)
    assert [output.told["method"] for output in again] == ["exact"] * len(prompts)


def test_other_tenants_do_not_find_it(engine: Engine) -> None:
    prompt = tokens(200, 80_000)
    engine.ask([prompt], max_tokens=1, salt="one")
    (other,) = engine.ask([prompt], max_tokens=1, salt="two")
    assert other.told["method"] == "none"
    (own,) = engine.ask([prompt], max_tokens=1, salt="one")
    assert own.told["method"] == "exact"


def test_a_slow_store_is_not_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first long prompt on it is known how long computing takes. The last test: the steps tell that to those behind it too."""
    engine.ask([tokens(600, 90_000)], max_tokens=1)
    engine.settle()
    store, go = worker_side().store, Event()
    put = store.put
    monkeypatch.setattr(store, "put", lambda chunk: go.wait(600) and put(chunk))
    prompt = tokens(600, 90_001)
    (first,) = engine.ask([prompt], max_tokens=1)
    (again,) = engine.ask([prompt], max_tokens=1)
    assert not worker_side().saver.flush(0)  # answered while the first one's state is still being written
    assert (again.told["method"], again.tokens) == ("none", first.tokens)
    go.set()
    engine.settle()
    (later,) = engine.ask([prompt], max_tokens=1)
    assert later.told["method"] == "exact"
