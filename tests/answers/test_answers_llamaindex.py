"""The answer cache around LlamaIndex, which has no cache of answers: the decorator, with the real package."""

import asyncio
import warnings
from typing import Any

import pytest
from tests.answers.test_answer_cache import ASKED, NEAR, OTHER, opened

with warnings.catch_warnings():  # their own, as they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("llama_index.core", reason="make installs it: pip install -e '.[test-frameworks]'")
    from llama_index.core.query_engine import CustomQueryEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::dejakv")]


class Engine(CustomQueryEngine):
    """A query engine that counts."""

    ran: list[str]

    def custom_query(self, query_str: str) -> str:
        self.ran.append(query_str)
        return "Paris." if "france" in query_str else "Madrid."


def test_a_query_engine_runs_once_for_similar_questions() -> None:
    engine = Engine(ran=[])
    with opened() as answers:

        @answers.cached(context="the index of Monday")
        def ask(question: str) -> str:
            return str(engine.query(question))

        first, near, other = ask(ASKED), ask(NEAR), ask(OTHER)
    hit: Any = near
    assert (first, near, other) == ("Paris.", "Paris.", "Madrid.")
    assert (hit.hit.method, hit.hit.question, engine.ran) == ("adopt", ASKED, [ASKED, OTHER])


def test_a_query_engine_is_awaited_once_for_similar_questions() -> None:
    engine = Engine(ran=[])
    with opened() as answers:

        @answers.cached()
        async def ask(question: str) -> str:
            return str(await engine.aquery(question))

        async def both() -> list[str]:
            return [await ask(ASKED), await ask(NEAR)]

        assert asyncio.run(both()) == ["Paris.", "Paris."]
    assert engine.ran == [ASKED]
