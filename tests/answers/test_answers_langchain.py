"""The answer cache in LangChain, with the real package."""

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tests.answers.test_answer_cache import ASKED, NEAR, OTHER, opened

from dejakv.answers import AnswerCache

with warnings.catch_warnings():  # their own, as they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("langchain_core", reason="make installs it: pip install -e '.[test-frameworks]'")
    from langchain_core.language_models import BaseChatModel, FakeListLLM
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, ChatResult, Generation

    from dejakv.answers.langchain import LangChainCache

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::dejakv")]


class Counted(BaseChatModel):
    """A chat model that answers with its messages in turn, and counts."""

    messages: list[Any]
    temperature: float = 0.0
    ran: int = 0

    @property
    def _llm_type(self) -> str:
        return "counted"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.ran += 1
        message = self.messages[min(self.ran, len(self.messages)) - 1]
        return ChatResult(generations=[ChatGeneration(message=message.model_copy())])


def answer(text: Any = "Paris.", reason: str | None = "stop", **fields: Any) -> AIMessage:
    return AIMessage(text, response_metadata={"finish_reason": reason} if reason else {}, **fields)


@pytest.fixture
def answers() -> Iterator[AnswerCache]:
    with opened() as answers:
        yield answers


def chat(answers: AnswerCache, *messages: Any, partition: str = "default", **fields: Any) -> Counted:
    cache = LangChainCache(answers, partition=partition)
    return Counted(messages=messages or [answer()], cache=cache, **fields)


def test_a_chat_hits_for_equal_messages_and_is_labelled_for_a_similar_last_one(answers: AnswerCache) -> None:
    model, system = chat(answers), SystemMessage("Be brief.")
    assert model.invoke([system, HumanMessage(ASKED)]).text == "Paris."
    exact, near = (model.invoke([system, HumanMessage(text)]) for text in (ASKED, NEAR))
    assert model.ran == 1
    assert (exact.text, near.text) == ("Paris.", "Paris.")
    assert exact.response_metadata["dejakv"]["method"] == "exact"
    label = near.response_metadata["dejakv"]
    assert (label["method"], label["question"]) == ("adopt", ASKED)
    assert 0.8 < label["score"] < 1
    assert near.response_metadata["finish_reason"] == "stop"


def test_other_earlier_messages_models_and_partitions_miss(answers: AnswerCache) -> None:
    chat(answers).invoke([SystemMessage("Be brief."), HumanMessage(ASKED)])
    for model, messages in (
        (chat(answers), [SystemMessage("Be rude."), HumanMessage(ASKED)]),
        (chat(answers), [HumanMessage(ASKED)]),
        (chat(answers), [SystemMessage("Be brief."), HumanMessage(OTHER)]),
        (chat(answers, temperature=1.0), [SystemMessage("Be brief."), HumanMessage(ASKED)]),
        (chat(answers, partition="bob"), [SystemMessage("Be brief."), HumanMessage(NEAR)]),
    ):
        model.invoke(messages)
        assert model.ran == 1


def test_a_block_of_text_is_compared_and_other_blocks_must_be_equal(answers: AnswerCache) -> None:
    model = chat(answers)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    model.invoke([HumanMessage([{"type": "text", "text": ASKED}])])
    assert (
        model.invoke([HumanMessage([{"type": "text", "text": NEAR}])]).response_metadata["dejakv"]["method"] == "adopt"
    )
    model.invoke([HumanMessage([{"type": "text", "text": ASKED}, picture])])
    model.invoke([HumanMessage([{"type": "text", "text": NEAR}, picture])])
    assert model.ran == 3
    assert (
        model.invoke([HumanMessage([{"type": "text", "text": ASKED}, picture])]).response_metadata["dejakv"]["method"]
        == "exact"
    )


def test_a_conversation_that_does_not_end_with_a_person_must_be_equal(answers: AnswerCache) -> None:
    model = chat(answers)
    call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
    for text, ran in ((ASKED, 1), (NEAR, 2), (ASKED, 2)):
        model.invoke([HumanMessage("Look it up."), call, ToolMessage(text, tool_call_id="1")])
        assert model.ran == ran


@pytest.mark.parametrize(
    "message",
    [
        answer(reason="length"),
        answer(reason="content_filter"),
        AIMessage("Paris.", response_metadata={"stop_reason": "max_tokens"}),
        AIMessage("Paris.", response_metadata={"done_reason": "length"}),
        answer("", reason="tool_calls", tool_calls=[{"name": "look", "args": {}, "id": "1"}]),
        answer("I look it up.", tool_calls=[{"name": "look", "args": {}, "id": "1"}]),
        answer("I look.", invalid_tool_calls=[{"name": "look", "args": "{", "id": "1", "error": None}]),
        answer("Paris.", additional_kwargs={"refusal": "I cannot."}),
        answer([{"type": "text", "text": "x"}, {"type": "refusal", "refusal": "I cannot."}]),
        answer(" "),
    ],
)
def test_what_is_no_finished_answer_is_not_kept(answers: AnswerCache, message: AIMessage) -> None:
    model = chat(answers, message, answer())
    assert model.invoke(ASKED).content == message.content
    assert (model.invoke(ASKED).text, model.ran) == ("Paris.", 2)
    assert (model.invoke(ASKED).text, model.ran) == ("Paris.", 2)


def test_an_error_is_not_kept(answers: AnswerCache) -> None:
    class Failing(Counted):
        def _generate(self, *_: Any, **__: Any) -> ChatResult:
            raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        Failing(messages=[], cache=LangChainCache(answers)).invoke(ASKED)
    assert len(answers) == 0


def test_an_answer_without_a_reason_is_kept_with_all_that_came_with_it(answers: AnswerCache) -> None:
    usage = {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11}
    model = chat(answers, answer(reason=None, usage_metadata=usage, additional_kwargs={"note": [1, {"a": None}]}))
    model.invoke(ASKED)
    hit = model.invoke(ASKED)
    assert (hit.additional_kwargs, hit.usage_metadata["total_tokens"]) == ({"note": [1, {"a": None}]}, 11)


def test_values_that_are_no_json_are_not_kept(answers: AnswerCache) -> None:
    chat(answers, answer(additional_kwargs={"note": object()})).invoke(ASKED)
    assert len(answers) == 0


def test_a_language_model_hits_by_its_prompt(answers: AnswerCache) -> None:
    model = FakeListLLM(responses=["Paris.", "Madrid."], cache=LangChainCache(answers))
    assert [model.invoke(text) for text in (ASKED, NEAR, OTHER)] == ["Paris.", "Paris.", "Madrid."]


def test_lookup_update_and_clear(answers: AnswerCache) -> None:
    ann, bob = (LangChainCache(answers, partition=name) for name in ("ann", "bob"))
    for cache in (ann, bob):
        cache.update(ASKED, "llm", [Generation(text="Paris.", generation_info={"finish_reason": "stop"})])
    (hit,) = ann.lookup(NEAR, "llm") or []
    assert hit.text == "Paris."
    assert hit.generation_info is not None
    assert hit.generation_info["dejakv"]["method"] == "adopt"
    assert ann.lookup(ASKED, "another llm") is None
    ann.update(OTHER, "llm", [])
    ann.update(OTHER, "llm", [Generation(text="Madrid."), Generation(text="")])
    assert ann.lookup(OTHER, "llm") is None
    ann.clear()
    assert ann.lookup(ASKED, "llm") is None
    assert bob.lookup(ASKED, "llm") is not None


def test_the_async_forms(answers: AnswerCache) -> None:
    async def all_of_it() -> None:
        model = chat(answers)
        await model.ainvoke(ASKED)
        assert (await model.ainvoke(NEAR)).response_metadata["dejakv"]["method"] == "adopt"
        assert model.ran == 1
        cache: Any = model.cache
        await cache.aupdate(OTHER, "llm", [Generation(text="Madrid.")])
        assert (await cache.alookup(OTHER, "llm"))[0].text == "Madrid."
        await cache.aclear()
        assert await cache.alookup(OTHER, "llm") is None

    asyncio.run(all_of_it())
