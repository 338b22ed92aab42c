"""The same prompt again as soon as its answer is there: its state is found, though it is still being saved."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_harness import Engine, running, tokens

COUNT = 12


@pytest.fixture(scope="module", params=["disk", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One whose own prefix cache is off, so that nothing but the store serves."""
    extra: dict[str, Any] = {"store_dir": str(tmp_path_factory.mktemp("kv"))} if request.param == "disk" else {}
    with running(extra=extra, enable_prefix_caching=False) as started:
        yield started


@pytest.mark.parametrize("answer", [1, 6])
def test_a_prompt_again(engine: Engine, answer: int) -> None:
    for number in range(COUNT):
        prompt = tokens(500, 1000 * answer + number)
        (first,) = engine.ask([prompt], max_tokens=answer)
        (again,) = engine.ask([prompt], max_tokens=answer)
        assert (again.told["method"], again.told["tokens_reused"]) == ("exact", 499), (number, again.told)
        assert again.tokens == first.tokens


@pytest.mark.parametrize("answer", [1, 6])
def test_a_conversation_that_goes_on(engine: Engine, answer: int) -> None:
    for number in range(COUNT):
        prompt = tokens(500, 3000 + 1000 * answer + number)
        (first,) = engine.ask([prompt], max_tokens=answer)
        (longer,) = engine.ask([[*prompt, *first.tokens, *tokens(50, number)]], max_tokens=answer)
        assert (longer.told["method"], longer.told["tokens_reused"]) == ("exact", 500), (number, longer.told)


def test_several_clients_at_once(engine: Engine) -> None:
    """Each asks its own prompt a second time, all together."""
    prompts = [tokens(400, 7000 + number) for number in range(6)]
    engine.ask(prompts, max_tokens=1)
    again = engine.ask(prompts, max_tokens=1)
    assert [output.told["method"] for output in again] == ["exact"] * len(prompts)


def test_other_tenants_neither_find_nor_await_it(engine: Engine) -> None:
    prompt = tokens(500, 8000)
    engine.ask([prompt], max_tokens=1, salt="one")
    (other,) = engine.ask([prompt], max_tokens=1, salt="two")
    assert other.told["method"] == "none"
    (own,) = engine.ask([prompt], max_tokens=1, salt="one")
    assert own.told["method"] == "exact"
