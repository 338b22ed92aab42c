"""Fields of OpenAI's API and of vLLM's, through the openai client: what is not supported is refused by name, `stop` ends decoding."""

import asyncio
from typing import Any, cast

import openai
import pytest
from tests.server.test_server_openai import messages, question
from tests.serving import Running, stored

from dejakv.server.routes_generate import cut_at_stop
from dejakv.server.settings import ServerSettings

MESSAGES = messages(question(0))
CHAT: dict[str, Any] = {"model": "docs-lm", "messages": MESSAGES, "temperature": 0, "max_tokens": 3}
PLAIN: dict[str, Any] = {"model": "docs-lm", "prompt": "ann lives in paris .", "temperature": 0, "max_tokens": 3}

REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 100},
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "web_search_options": {},
    "ignore_eos": True,
    "kv_transfer_params": {"dejakv": {"mode": "blend"}},
    "top_k": 5,
}
NEUTRAL: dict[str, Any] = {
    "echo": False,
    "logprobs": False,
    "metadata": {"run": "1"},
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "stop": None,
    "stream_options": None,
    "temperature": None,
    "tool_choice": "none",
    "tools": [],
    "user": "u",
    "repetition_penalty": 1.0,
    "top_k": None,
}


def told(error: openai.APIStatusError) -> tuple[str, str]:
    """The field that the error names, and its message; every key of OpenAI's error object is there."""
    body = cast(dict[str, Any], error.body)
    assert set(body) == {"message", "type", "param", "code"}, body
    assert body["type"] == "invalid_request_error"
    assert isinstance(body["code"], str)
    return body["param"], body["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(server: Any, name: str) -> None:
    client: openai.OpenAI = server.openai
    for create, asked in ((client.chat.completions.create, CHAT), (client.completions.create, PLAIN)):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                create(**asked, stream=stream, extra_body={name: REFUSED[name]})
            param, message = told(refused.value)
            assert param == name
            assert name in message
            assert "vLLM's own server" in message


def test_log_probabilities_come_with_each_token_and_are_those_of_full_computation(server: Any) -> None:
    client: openai.OpenAI = server.openai
    asked: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 3}
    first, hit = client.chat.completions.create(**asked), client.chat.completions.create(**asked)
    full = client.chat.completions.create(**asked, extra_body={"dejakv": {"no_cache": True}})
    assert hit.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]
    places = [reply.choices[0].logprobs.content for reply in (first, hit, full)]  # type: ignore[union-attr]
    assert "".join(place.token for place in places[0]) == first.choices[0].message.content
    for one, other, third in zip(*places, strict=True):
        assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]
        assert one.logprob == one.top_logprobs[0].logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.logprob == pytest.approx(third.logprob, abs=1e-4)

    plain = client.completions.create(**PLAIN, logprobs=2).choices[0]
    assert plain.logprobs is not None
    assert "".join(plain.logprobs.tokens) == plain.text
    assert [plain.text[at] for at in plain.logprobs.text_offset] == [token[0] for token in plain.logprobs.tokens]
    assert [max(tops.values()) for tops in plain.logprobs.top_logprobs] == plain.logprobs.token_logprobs
    assert client.completions.create(**PLAIN, logprobs=0).choices[0].logprobs.top_logprobs == [{}] * 3  # type: ignore[union-attr]


def test_log_probabilities_end_with_the_text_and_are_not_streamed(server: Any) -> None:
    client: openai.OpenAI = server.openai
    whole = client.completions.create(**PLAIN, logprobs=1).choices[0]
    cut = client.completions.create(**PLAIN, logprobs=1, stop=whole.logprobs.tokens[1]).choices[0]  # type: ignore[union-attr]
    assert cut.logprobs.tokens == [token for token in whole.logprobs.tokens[:1] if cut.text]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="leave out stream or logprobs"):
        client.chat.completions.create(**CHAT, logprobs=True, stream=True)


def test_no_cache_computes_in_full_and_stores_nothing(server: Any) -> None:
    client: openai.OpenAI = server.openai
    asked: dict[str, Any] = {**PLAIN, "prompt": "bob lives in oslo . " * 12}
    alone: dict[str, Any] = {"extra_body": {"dejakv": {"no_cache": True}}}
    replies = [client.completions.create(**asked, **more) for more in (alone, alone, {}, {}, alone)]
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]  # type: ignore[union-attr]
    assert [count > 0 for count in cached] == [False, False, False, True, False]
    assert cast(Any, replies[4]).dejakv["reason"] == "the request asks for no_cache"


def test_several_choices(server: Any) -> None:
    client: openai.OpenAI = server.openai
    greedy = client.chat.completions.create(**CHAT, n=3)
    assert [one.index for one in greedy.choices] == [0, 1, 2]
    assert len({one.message.content for one in greedy.choices}) == 1
    warm: dict[str, Any] = {**PLAIN, "temperature": 5, "max_tokens": 8, "seed": 3}
    drawn, again = (client.completions.create(**warm, n=4) for _ in range(2))
    assert len({one.text for one in drawn.choices}) > 1
    assert [one.text for one in again.choices] == [one.text for one in drawn.choices]
    assert drawn.choices[0].text == client.completions.create(**warm).choices[0].text
    assert drawn.usage is not None
    assert drawn.usage.total_tokens == drawn.usage.prompt_tokens + drawn.usage.completion_tokens


@pytest.mark.parametrize("asked", [{"n": 17}, {"n": 2, "stream": True}], ids=str)
def test_choices_have_limits(server: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        server.openai.chat.completions.create(**{**CHAT, **asked})


def test_an_agent_of_a_framework_has_a_conversation(server: Any) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def talk() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        model = agents.OpenAIChatCompletionsModel("docs-lm", client)
        settings = agents.ModelSettings(temperature=0, max_tokens=3)
        agent = agents.Agent("reader", instructions=MESSAGES[0]["content"], model=model, model_settings=settings)
        first = await agents.Runner.run(agent, MESSAGES[1]["content"])
        asked: list[Any] = [*first.to_input_list(), {"role": "user", "content": MESSAGES[1]["content"]}]
        streamed = agents.Runner.run_streamed(agent, asked)
        async for _ in streamed.stream_events():
            pass
        await client.close()
        return [first, streamed]

    first, second = asyncio.run(talk())
    assert first.final_output == server.openai.chat.completions.create(**CHAT).choices[0].message.content
    assert isinstance(second.final_output, str)
    assert first.context_wrapper.usage.input_tokens > 0


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_is_accepted(server: Any, name: str) -> None:
    client: openai.OpenAI = server.openai
    chat = client.chat.completions.create(**{**CHAT, "extra_body": {name: NEUTRAL[name]}})
    assert isinstance(chat.choices[0].message.content, str)
    plain = client.completions.create(**{**PLAIN, "extra_body": {name: NEUTRAL[name]}})
    assert isinstance(plain.choices[0].text, str)


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"temperature": 99}, "temperature", "10"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "up to 4"),
        ({"stop": [1]}, "stop", "up to 4"),
        ({"stop": ""}, "stop", "1 to 256"),
        ({"stop": "a" * 257}, "stop", "1 to 256"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content.0.type",
            "image_url",
        ),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "not supported",
        ),
        ({"dejakv": {"reuse": "magic"}}, "dejakv.reuse", "blend"),
        ({"dejakv": {"threshold": 3}}, "dejakv.threshold", "1"),
    ],
)
def test_what_does_not_fit_is_a_400_of_openais(server: Any, changed: Any, param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.chat.completions.create(**{**CHAT, "extra_body": changed})
    named, message = told(refused.value)
    assert named == param
    assert says in message
    assert "constrained" not in message


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_one_text_a_request(server: Any, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="give one text") as refused:
        server.openai.completions.create(model="docs-lm", prompt=prompt)
    assert told(refused.value)[0] == "prompt"


def test_an_assistants_message_may_come_back_as_it_was_sent(server: Any) -> None:
    client: openai.OpenAI = server.openai
    message = client.chat.completions.create(**CHAT).choices[0].message
    again: list[Any] = [*CHAT["messages"], message.to_dict(), {"role": "user", "content": "why?", "name": None}]
    again[-2] |= {"refusal": None, "tool_calls": [], "annotations": []}
    assert client.chat.completions.create(**{**CHAT, "messages": again}).choices


def test_a_model_by_its_name(server: Any) -> None:
    assert server.openai.models.retrieve("docs-lm").id == "docs-lm"
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.models.retrieve("gpt-4")
    assert told(missing.value)[0] == "model"


LONG: dict[str, Any] = {"model": "docs-lm", "prompt": "ann lives in paris . " * 4, "temperature": 0, "max_tokens": 40}


@pytest.fixture
def endless(engine: Any) -> Any:
    """The model makes no end token."""
    config = engine.model.generation_config
    before, config.suppress_tokens = config.suppress_tokens, [2]
    yield
    config.suppress_tokens = before


@pytest.mark.usefixtures("endless")
def test_stop_ends_decoding(server: Any) -> None:
    client: openai.OpenAI = server.openai
    whole = client.completions.create(**LONG)
    text = whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    for number, length in ((8, 1), (12, 3), (20, 6)):
        stop = text[number : number + length]
        expected = text[: text.index(stop)]
        for stops in (stop, ["@", stop, "##"]):
            stored(server)
            stopped = client.completions.create(**LONG, stop=stops)
            assert stopped.choices[0].text == expected
            assert stopped.choices[0].finish_reason == "stop"
            assert stopped.usage is not None
            assert stopped.usage.completion_tokens < 40
            streamed = list(
                client.completions.create(**LONG, stop=stops, stream=True, stream_options={"include_usage": True})
            )
            pieces = [choice.text for chunk in streamed for choice in chunk.choices]
            assert "".join(pieces) == expected
            assert streamed[-1].usage is not None
            assert streamed[-1].usage.completion_tokens == stopped.usage.completion_tokens
    assert client.completions.create(**LONG).choices[0].text == text, "a stopped answer is nobody else's"


@pytest.mark.usefixtures("endless")
def test_no_stop_is_made_of_the_prompts_own_text(server: Any) -> None:
    """A stop that begins in the prompt is none: it is looked for in what is new."""
    client: openai.OpenAI = server.openai
    first = client.completions.create(**LONG).choices[0].text
    stop = LONG["prompt"].rstrip()[-3:] + first[:4]
    again = client.completions.create(**LONG, stop=stop)
    assert again.choices[0].text == first
    assert again.choices[0].finish_reason == "length"


def test_of_two_stops_in_one_piece_the_first_counts() -> None:
    assert cut_at_stop("abcdef", ["ef", "cd"]) == ("ab", True)


@pytest.mark.parametrize("path", ["embeddings", "responses", "audio/speech"])
def test_other_endpoints_are_named_with_what_serves_them(path: str, server: Running) -> None:
    answer = server.http.post(f"/v1/{path}", json={"input": "x"})
    assert answer.status_code == 404
    assert "vLLM's own server" in answer.json()["error"]["message"]


def test_a_model_may_be_served_by_another_name(engine: Any) -> None:
    with Running(ServerSettings(served_model_name="ours/small"), engine) as running:
        [model] = running.openai.models.list()
        assert (model.id, model.owned_by) == ("ours/small", "dejakv")
        assert model.created > 1_700_000_000
        assert running.openai.chat.completions.create(**{**CHAT, "model": "ours/small"}).model == "ours/small"
        with pytest.raises(openai.NotFoundError, match="ours/small"):
            running.openai.chat.completions.create(**CHAT)


def test_names_and_marks_of_messages_are_accepted(server: Running) -> None:
    """`name` is a field of every message of OpenAI's; Anthropic's clients and routers before them mark prefixes by `cache_control`."""
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": question(0), **mark}]
    body = {**CHAT, "messages": [{"role": "user", "name": "ann", "content": content, **mark}]}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    for wrong in ({"name": 5}, {"name": "a: b"}, {"tool_call_id": "1"}):
        refused = server.http.post("/v1/chat/completions", json={**CHAT, "messages": [{**MESSAGES[0], **wrong}]})
        assert refused.status_code == 400
        assert next(iter(wrong)) in refused.text


def test_probes_may_ask_for_the_head_alone(server: Running) -> None:
    for path in ("/health", "/ready"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)])
def test_proxies_do_not_hold_streams_back(server: Running, path: str, body: dict[str, Any]) -> None:
    streamed = server.http.post(path, json={**body, "stream": True})
    assert streamed.headers["x-accel-buffering"] == "no"
    assert "x-accel-buffering" not in server.http.post(path, json=body).headers
