"""The answer cache in LiteLLM, with the real package: its answers are mocked by LiteLLM itself."""

import asyncio
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.answers.test_answer_cache import ASKED, NEAR, OTHER, opened, words

from dejakv.answers import AnswerCache
from dejakv.vectors.text import ModelTextEncoder

with warnings.catch_warnings():  # their own, as they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("litellm", reason="make installs it: pip install -e '.[test-frameworks]'")
    import litellm

    from dejakv.answers.litellm import LiteLLMCache

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::dejakv")]


@pytest.fixture
def answers() -> Iterator[AnswerCache]:
    with opened() as answers:
        litellm.cache = LiteLLMCache(answers)
        yield answers
        litellm.cache = None


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(messages: Any, mock: Any = "Paris.", **options: Any) -> Any:
    messages = user(messages) if isinstance(messages, str) else messages
    return litellm.completion(model="gpt-4o", messages=messages, mock_response=mock, **options)


def settled(answers: AnswerCache, entries: int) -> None:
    """Wait for what LiteLLM stores behind its answer."""
    deadline = time.monotonic() + 30
    while len(answers) < entries and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(answers) == entries


def text_of(response: Any) -> str:
    return response.choices[0].message.content


def test_a_completion_hits_and_a_similar_one_is_labelled(answers: AnswerCache) -> None:
    assert getattr(ask(ASKED), "dejakv", None) is None
    settled(answers, 1)
    exact, near = ask(ASKED, "another"), ask(NEAR, "another")
    assert (text_of(exact), text_of(near)) == ("Paris.", "Paris.")
    assert (exact.dejakv["method"], near.dejakv["method"], near.dejakv["question"]) == ("exact", "adopt", ASKED)
    assert 0.8 < near.dejakv["score"] < 1
    assert near._hidden_params["cache_hit"]


def test_other_words_parameters_and_earlier_messages_miss(answers: AnswerCache) -> None:
    system = {"role": "system", "content": "Be brief."}
    ask([system, *user(ASKED)])
    settled(answers, 1)
    assert text_of(ask([system, *user(OTHER)], "Madrid.")) == "Madrid."
    assert text_of(ask([system, *user(ASKED)], "another", temperature=0.7)) == "another"
    assert text_of(ask([system, *user(ASKED)], "another", max_tokens=5)) == "another"
    assert text_of(ask(ASKED, "another")) == "another"
    assert text_of(ask([{**system, "content": "Be rude."}, *user(NEAR)], "another")) == "another"


def test_pictures_are_part_of_the_question_by_their_content(answers: AnswerCache) -> None:
    def shown(url: str, text: str = ASKED) -> Any:
        return user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}])

    ask(shown("data:image/png;base64,AAAA"))
    settled(answers, 1)
    assert ask(shown("data:image/png;base64,AAAA", NEAR), "another").dejakv["method"] == "adopt"
    assert text_of(ask(shown("data:image/png;base64,BBBB"), "another")) == "another"
    settled(answers, 2)
    # What stands at an address may change.
    ask(shown("https://pictures.invalid/a.png"))
    assert text_of(ask(shown("https://pictures.invalid/a.png"), "another")) == "another"


def test_a_conversation_that_does_not_end_with_the_user_must_be_equal(answers: AnswerCache) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    head = [*user("Look it up."), {"role": "assistant", "content": None, "tool_calls": [call]}]
    ask([*head, {"role": "tool", "tool_call_id": "1", "content": ASKED}])
    settled(answers, 1)
    assert ask([*head, {"role": "tool", "tool_call_id": "1", "content": ASKED}], "another").dejakv["method"] == "exact"
    assert text_of(ask([*head, {"role": "tool", "tool_call_id": "1", "content": NEAR}], "another")) == "another"


def response(reason: str = "stop", **message: Any) -> Any:
    message = {"role": "assistant", "content": "Paris.", **message}
    return litellm.ModelResponse(choices=[{"index": 0, "finish_reason": reason, "message": message}])


TOOLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("length", {}),
        ("content_filter", {}),
        ("tool_calls", {"content": None, "tool_calls": TOOLS}),
        ("stop", {"content": "I look it up.", "tool_calls": TOOLS}),
        ("stop", {"content": " "}),
    ],
)
def test_what_is_no_finished_answer_is_not_kept(answers: AnswerCache, reason: str, message: Any) -> None:
    mock = response(reason, **message)
    cache: Any = litellm.cache
    cache.add_cache(mock, model="gpt-4o", messages=user(ASKED))
    cache.add_cache(mock.model_dump_json(), model="gpt-4o", messages=user(ASKED))
    assert len(answers) == 0
    cache.add_cache(response().model_dump_json(), model="gpt-4o", messages=user(ASKED))
    assert cache.get_cache(model="gpt-4o", messages=user(ASKED)) is not None


def test_a_refusal_is_not_kept(answers: AnswerCache) -> None:
    body = response().model_dump()
    body["choices"][0]["message"]["refusal"] = "I cannot."
    cache: Any = litellm.cache
    cache.add_cache(litellm.ModelResponse(**body), model="gpt-4o", messages=user(ASKED))
    assert len(answers) == 0


def test_an_error_is_not_kept(answers: AnswerCache) -> None:
    with pytest.raises(litellm.RateLimitError):
        ask(ASKED, "litellm.RateLimitError")
    assert text_of(ask(ASKED)) == "Paris."


def test_a_stream_hits_for_equal_questions_alone_since_it_has_no_label(answers: AnswerCache) -> None:
    def streamed(text: str, mock: str = "another") -> str:
        chunks = list(ask(text, mock, stream=True))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert streamed(ASKED, "Paris.") == "Paris."
    settled(answers, 1)
    assert streamed(ASKED) == "Paris."
    assert streamed(NEAR) == "another"


def test_the_controls_of_a_call_hold(answers: AnswerCache) -> None:
    ask(OTHER, cache={"no-store": True})
    ask(ASKED)
    settled(answers, 1)
    assert text_of(ask(ASKED, "another", cache={"no-cache": True})) == "another"
    cache: Any = litellm.cache
    asked = {"model": "gpt-4o", "messages": user(ASKED)}
    assert cache.get_cache(**asked, cache={"s-maxage": 1000}) is not None
    assert cache.get_cache(**asked, cache={"s-maxage": -1}) is None
    cache.add_cache(response(), model="gpt-4o", messages=user(OTHER), cache={"ttl": 1e-9})
    assert cache.get_cache(model="gpt-4o", messages=user(OTHER)) is None


def test_opt_in(answers: AnswerCache) -> None:
    litellm.cache = LiteLLMCache(answers, mode=litellm.caching.caching.CacheMode.default_off)
    ask(ASKED)
    assert text_of(ask(ASKED, "another")) == "another"
    ask(ASKED, cache={"use-cache": True})
    settled(answers, 1)
    assert text_of(ask(ASKED, "another", cache={"use-cache": True})) == "Paris."


def test_keys_of_the_proxy_are_partitions(answers: AnswerCache) -> None:
    ask(ASKED, metadata={"user_api_key": "ann"})
    settled(answers, 1)
    assert text_of(ask(NEAR, "another", metadata={"user_api_key": "bob"})) == "another"
    assert text_of(ask(NEAR, "another")) == "another"
    assert text_of(ask(NEAR, "another", metadata={"user_api_key": "ann"})) == "Paris."
    litellm.cache = LiteLLMCache(answers, partition=lambda kwargs: kwargs.get("user", "nobody"))
    assert text_of(ask(ASKED, "another", user="carl")) == "another"


def test_what_is_no_completion_is_left_alone(answers: AnswerCache) -> None:
    cache: Any = litellm.cache
    cache.add_cache(response(), model="e", input="text")
    cache.add_cache(object(), model="m", messages=user(ASKED))
    assert cache.get_cache(model="m", messages=[object()]) is None
    assert len(answers) == 0


def test_a_wrong_encoder_stops_no_call_and_is_told(answers: AnswerCache, caplog: pytest.LogCaptureFixture) -> None:
    ask(ASKED)
    settled(answers, 1)
    sizes = iter([64, 64, 32, 32])
    changing = ModelTextEncoder(lambda text: words(text, next(sizes)) + np.float32(0.1), "changing")
    with opened(encoder=changing) as other, caplog.at_level(logging.ERROR, "dejakv.answers"):
        cache = litellm.cache = LiteLLMCache(other)
        asked = {"model": "m", "messages": user(OTHER)}
        cache.add_cache(response(), model="m", messages=user(ASKED))
        assert cache.get_cache(**asked) is None
        assert cache.get_cache(**asked) is None
    assert "use the encoder that the index was made for" in caplog.text


def test_coroutines_and_text_completions(answers: AnswerCache) -> None:
    async def all_of_it() -> None:
        options: dict[str, Any] = {"model": "gpt-4o", "mock_response": "Paris."}
        await litellm.acompletion(messages=user(ASKED), **options)
        await asyncio.to_thread(settled, answers, 1)
        near = await litellm.acompletion(messages=user(NEAR), model="gpt-4o", mock_response="another")
        assert (text_of(near), near.dejakv["method"]) == ("Paris.", "adopt")

    asyncio.run(all_of_it())
    completion = litellm.text_completion(model="gpt-3.5-turbo-instruct", prompt=ASKED, mock_response="Paris.")
    assert completion.choices[0].text == "Paris."
    settled(answers, 3)  # LiteLLM runs it as a chat completion, which it stores, too
    near: Any = litellm.text_completion(model="gpt-3.5-turbo-instruct", prompt=NEAR, mock_response="another")
    assert near.choices[0].text == "Paris."
    assert near.dejakv["method"] == "adopt"
