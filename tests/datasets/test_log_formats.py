"""One conversation in every format gives the same prompt; what is no text, and what is no prompt, is named; bad files end in a sentence."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dejakv.datasets.base import Sample
from dejakv.datasets.log import RequestLog
from dejakv.errors import DatasetError, DejaKVError
from dejakv.experiments.estimate import estimate
from dejakv.experiments.savings import SavingsCounter, savings_sentences, sheets

RULES = "You answer from the town register. Never guess, and name the street."
ASKED, FOUND, ANSWER, AGAIN = "Where is Ann?", "Ann: 4 Elm Road", "At 4 Elm Road.", "And Bob?"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
ARGUMENTS = {"name": "Ann"}
DEFINED = {"name": "look_up", "description": "Looks a person up.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": DEFINED}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(ARGUMENTS)}}

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": RULES},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": FOUND},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": AGAIN},
]
OPENAI = {"model": "m", "temperature": 0, "messages": CHAT, "tools": [TOOL]}
PARTS = {
    **OPENAI,
    "messages": [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["content"] else message
        for message in CHAT
    ],
}
LEGACY = {
    "messages": [
        *CHAT[:2],
        {"role": "assistant", "content": "", "function_call": CALL["function"]},
        {"role": "function", "name": "look_up", "content": FOUND},
        *CHAT[4:],
    ],
    "functions": [DEFINED],
}
RESPONSES = {
    "model": "m",
    "instructions": RULES,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": FOUND},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]},
        {"type": "message", "role": "user", "content": AGAIN},
    ],
    "tools": [{"type": "function", **DEFINED, "strict": True}],
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 100,
    "system": [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "look_up", "description": DEFINED["description"], "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look_up", "input": ARGUMENTS}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": FOUND}]}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "user", "content": [{"type": "text", "text": AGAIN}]},
    ],
}
GEMINI = {
    "systemInstruction": {"parts": [{"text": RULES}]},
    "tools": [{"functionDeclarations": [DEFINED]}],
    "contents": [
        {"role": "user", "parts": [{"text": ASKED}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look_up", "args": ARGUMENTS}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look_up", "response": {"result": FOUND}}}]},
        {"role": "model", "parts": [{"text": ANSWER}]},
        {"role": "user", "parts": [{"text": AGAIN}]},
    ],
    "generationConfig": {"temperature": 0},
}
BEDROCK = {
    "system": [{"text": RULES}],
    "toolConfig": {
        "tools": [
            {"toolSpec": {"name": "look_up", "description": DEFINED["description"], "inputSchema": {"json": SCHEMA}}}
        ]
    },
    "messages": [
        {"role": "user", "content": [{"text": ASKED}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c1", "name": "look_up", "input": ARGUMENTS}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": FOUND}]}}]},
        {"role": "assistant", "content": [{"text": ANSWER}]},
        {"role": "user", "content": [{"text": AGAIN}]},
    ],
}
LANGCHAIN = {
    "messages": [
        {"type": "system", "content": RULES},
        {"type": "human", "content": ASKED},
        {"type": "ai", "content": "", "tool_calls": [{"name": "look_up", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}]},
        {"type": "tool", "content": FOUND, "tool_call_id": "c1"},
        {"type": "ai", "content": ANSWER, "additional_kwargs": {}},
        {"type": "human", "content": AGAIN},
    ],
    "tools": [TOOL],
}  # fmt: skip
NAMES = {"system": "SystemMessage", "human": "HumanMessage", "ai": "AIMessage", "tool": "ToolMessage"}
DUMPED = {
    "messages": [
        [
            {"lc": 1, "type": "constructor", "id": ["langchain", "schema", NAMES[message["type"]]],
             "kwargs": {key: value for key, value in message.items() if key != "type"}}
            for message in LANGCHAIN["messages"]
        ]
    ],
    "tools": [TOOL],
}  # fmt: skip
AS_MESSAGES = [*CHAT[:1], {"role": "tool", "content": TOOL}, *CHAT[1:]]

FORMATS: dict[str, Any] = {
    "OpenAI": OPENAI,
    "content parts": PARTS,
    "functions": LEGACY,
    "Responses API": RESPONSES,
    "Anthropic": ANTHROPIC,
    "Gemini": GEMINI,
    "Bedrock": BEDROCK,
    "LangChain": LANGCHAIN,
    "LangChain's dump": DUMPED,
    "system beside messages": {"system": RULES, "messages": CHAT[1:], "tools": [TOOL]},
    "definitions as messages": {"messages": AS_MESSAGES},
    "JSON text": {"messages": json.dumps(CHAT), "tools": json.dumps([TOOL])},
    "a request within": {"id": "1", "request": {"method": "POST", "body": OPENAI}},
    "a body as text": {"request": json.dumps({"body": json.dumps(ANTHROPIC)})},
    "Bedrock's log": {"operation": "Converse", "input": {"inputBodyJson": BEDROCK}, "output": {"outputBodyJson": {}}},
    "a batch": {"custom_id": "1", "body": OPENAI},
    "a batch of responses": {"custom_id": "1", "url": "/v1/responses", "body": RESPONSES},
    "Langfuse": {"traceId": "t", "type": "GENERATION", "input": OPENAI},
    "Langfuse, messages": {"traceId": "t", "type": "GENERATION", "input": AS_MESSAGES},
    "Langfuse, JSON text": {"traceId": "t", "type": "GENERATION", "input": json.dumps(json.dumps(AS_MESSAGES))},
    "Langfuse, Gemini": {"traceId": "t", "type": "GENERATION", "input": GEMINI},
    "LiteLLM": {"call_type": "acompletion", "messages": CHAT, "model_parameters": {"tools": [TOOL]}},
    "LiteLLM, responses": {
        "call_type": "aresponses", "messages": RESPONSES["input"],
        "model_parameters": {"tools": RESPONSES["tools"], "instructions": RULES},
    },
    "LiteLLM's proxy": {"call_type": "acompletion", "messages": "{}", "proxy_server_request": {"url": "u", "body": ANTHROPIC}},
    "vLLM": f"DEBUG 11-03 09:12:00.120 [request_logger.py:75] Request x JSON body: {json.dumps(OPENAI)}",
}  # fmt: skip


def read(path: Path, *lines: Any) -> RequestLog:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    log = RequestLog(path)
    log.samples = [entry.sample for entry in log.entries()]  # type: ignore[attr-defined]
    return log


def samples(log: RequestLog) -> list[Sample]:
    return log.samples  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMATS)
def test_one_conversation_in_every_format(name: str, tmp_path: Path) -> None:
    log = read(tmp_path / "log", OPENAI, FORMATS[name])
    assert log.broken == {}
    usual, this = samples(log)
    for text in (RULES, "Looks a person up.", '"name": "Ann"', FOUND, ANSWER, AGAIN):
        assert text in str(usual.messages).replace("\\'", "'"), text
    assert this.messages == usual.messages
    assert not log.partly


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def asking(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}], **more}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (asking(PICTURE), "parts of type 'image_url'"),
        (asking({"type": "input_audio", "input_audio": {"data": "AA"}}), "parts of type 'input_audio'"),
        (asking({"type": "file", "file": {"file_data": "AA"}}), "parts of type 'file'"),
        (asking({"type": "image", "source": {"type": "base64", "data": "AA"}}), "parts of type 'image'"),
        (asking({"type": "document", "source": {"type": "base64", "data": "AA"}}), "parts of type 'document'"),
        (asking({"inlineData": {"mimeType": "image/png", "data": "AA"}}), "parts of type 'inlineData'"),
        (asking({"type": "sketch", "strokes": [1]}), "parts of type 'sketch'"),
        (asking({"type": "thinking", "thinking": "hm"}), "reasoning"),
        (asking(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}), "field 'response_format'"),
        (asking(previous_response_id="r1"), "field 'previous_response_id'"),
        (asking(prompt="another text"), "field 'prompt'"),
        ({"body": {"prompt": {"id": "p1"}, "input": "a"}}, "field 'prompt'"),
        ({"call_type": "completion", "messages": "a b (litellm_truncated 500 chars)"}, "what LiteLLM cut of long texts"),
        (asking(retrieved=["some words of a passage " * 9]), "field 'retrieved'"),
        ({"messages": [{"role": "user", "content": "a", "name": "ann"}]}, "names of speakers"),
        ({"prompt": "What?", "image": "a.png"}, "pictures"),
        ({"prompt": "What?", "notes": "some words of a passage " * 9}, "field 'notes'"),
        ({"body": {"prompt": "What?", "suffix": "end"}}, "field 'suffix'"),
        ({"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "a"}]}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "1"}, {"role": "user", "content": "a"}]}, "items of type 'item_reference'"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named_with_its_share(line: Any, named: str, tmp_path: Path) -> None:
    log = read(tmp_path / "log", line, {"prompt": "b", "user": "u"})
    assert dict(log.partly) == {named: 1}
    assert f"not counted: {named}, in 1 of 2 requests (50%)" in log.left_out


def test_text_of_other_parts_is_counted(tmp_path: Path) -> None:
    parts = [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "plain"}},
        {"type": "search_result", "source": "u", "title": "S", "content": [{"type": "text", "text": "passage"}]},
        {"type": "note", "content": "other"},
        "bare",
    ]
    log = read(tmp_path / "log", asking(*parts, documents=[{"title": "d", "text": "shelf"}]))
    assert [dict(sample.messages) for sample in samples(log)] == [
        {"system": "d\nshelf", "user": "What?\nT\nplain\nS\npassage\nother\nbare"}
    ]
    assert not log.partly


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ({"instruction": "Translate.", "input": "Haus", "output": "house"}, (("system", "Translate."), ("user", "Haus"))),
        ({"instruction": "Say hello.", "input": ""}, (("user", "Say hello."),)),
        ({"preamble": "Be brief.", "chat_history": [{"role": "USER", "message": "a"}, {"role": "CHATBOT", "message": "b"}], "message": "c"},
         (("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"))),
        ({"system": "Be brief.", "prompt": "a", "context": None}, (("system", "Be brief."), ("user", "a"))),
        ({"contents": "a", "system_instruction": "s"}, (("system", "s"), ("user", "a"))),
        ({"key": "1", "request": {"contents": [{"parts": [{"text": "a"}]}]}}, (("user", "a"),)),
        ({"custom_id": "1", "params": {"system": "s", "messages": [{"role": "user", "content": "a"}]}}, (("system", "s"), ("user", "a"))),
        ({"documents": [{"title": "t", "snippet": "x"}], "message": "q"}, (("system", "t\nx"), ("user", "q"))),
        ({"messages": [{"role": "assistant", "parts": [{"type": "tool-f", "toolCallId": "1", "input": {"x": 1}, "output": "o"}]}]},
         (("assistant", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'), ("user", "<tool_response>\no\n</tool_response>"))),
        ({"messages": [{"role": "system", "content": "alone"}]}, (("user", "alone"),)),
        ({"body": {"input": "a", "instructions": "s"}}, (("system", "s"), ("user", "a"))),
    ],
)  # fmt: skip
def test_other_forms(line: Any, messages: Any, tmp_path: Path) -> None:
    log = read(tmp_path / "log", line)
    assert log.broken == {}
    assert samples(log)[0].messages == messages


MOMENT = 1793697120.5


@pytest.mark.parametrize(
    ("value", "time"),
    [
        (MOMENT, MOMENT), (MOMENT * 1e3, MOMENT), (MOMENT * 1e6, MOMENT), (1793697120500000000, MOMENT), (str(MOMENT), MOMENT),
        ("1793697120500", MOMENT), ("2026-11-03T09:12:00.5Z", MOMENT), ("2026-11-03 09:12:00.500000 UTC", MOMENT),
        ("2026-11-03T10:12:00.500+01:00", MOMENT), (12.5, 12.5), (0, 0.0),
        (float("nan"), None), (float("inf"), None), (-1, None), (10**400, None), (1e300, None), ("soon", None), (True, None),
        ({"$date": 1}, None), ([1], None), ("", None), ("0001-01-01T00:00:00+23:00", None), ("9999-12-31T23:59:59-23:00", None),
    ],
)  # fmt: skip
def test_times_in_any_unit_or_none(value: Any, time: float | None, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "timestamp": value},
        {**FORMATS["Langfuse"], "startTime": value},
        {**FORMATS["LiteLLM"], "startTime": value},
    ]
    read(tmp_path / "log", *lines)
    entries = list(RequestLog(tmp_path / "log").entries())
    assert [entry.time for entry in entries] == [None if time is None else pytest.approx(time, abs=1e-3)] * 3
    savings = SavingsCounter()
    for entry in entries:
        savings.add(range(40), entry)
    assert savings_sentences(savings.figures()) is not None
    read(tmp_path / "trace", {"timestamp": value, "input_length": 9, "hash_ids": [1]})
    assert estimate(tmp_path / "trace", "docs-lm")["samples"] == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({**FORMATS["LiteLLM"], "cache_hit": True}, "1 request that a cache answered"),
        ({**FORMATS["LiteLLM"], "cache_hit": "True"}, "1 request that a cache answered"),
        ({**FORMATS["LiteLLM"], "status": "failure"}, "1 request that failed"),
        ({**FORMATS["Langfuse"], "level": "ERROR"}, "1 request that failed"),
        ({**FORMATS["a batch"], "response": {"status_code": 500}}, "1 request that failed"),
        ({"prompt": "a", "error": {"code": 1}}, "1 request that failed"),
        ({"prompt": "a", "status_code": 429}, "1 request that failed"),
        ({"call_type": "aembedding", "messages": "a"}, "1 request for embeddings or the like"),
        ({"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "a"}}, "1 request for embeddings or the like"),
        ({"custom_id": "1", "body": {"model": "text-embedding-3-small", "input": ["a"]}}, "1 request for embeddings or the like"),
        ({"traceId": "t", "type": "EMBEDDING", "input": "a"}, "1 request for embeddings or the like"),
        ({"traceId": "t", "type": "SPAN", "input": "a"}, "1 span of a trace"),
    ],
)  # fmt: skip
def test_rows_that_are_no_prompts_are_counted_by_what_they_are(line: Any, said: str, tmp_path: Path) -> None:
    log = read(
        tmp_path / "log", line, {"prompt": "b", "user": "u", "cache_hit": False, "status": "success", "error": None}
    )
    assert (len(samples(log)), log.broken) == (1, {})
    assert f"left out: {said}" in log.left_out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{\n  "prompt": "a"\n}\n', r"JSON over several lines: write one request a line \(jq -c"),
        ('{\n "data": [\n  {"prompt": "a"}\n ]\n}', "JSON over several lines"),
        ('{"data": [{"prompt": "a"}]}', r"jq -c '\.data\[\]' FILE"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n", "BurstGPT: rename"),
        ("id,prompt,answer\n1,a,b\n", r"a table \(CSV\): write it as JSON lines"),
        ("prompt\tanswer\na\tb\n", r"a table \(CSV\)"),
        ('{"id": "b1", "custom_id": "r", "response": {"status_code": 200, "body": {"choices": []}}, "error": null}', "the output of a batch: give the batch's input"),
        ('{"object": "chat.completion", "choices": [{"message": {"content": "a"}}]}', "an answer without its prompt"),
        ("INFO 08-12 10:00:00 logger.py:36] Received request a: params: SamplingParams(n=1), lora_request: None.", "at level DEBUG alone"),
        ('{"call_type": "completion", "messages": [{"role": "user", "content": "redacted-by-litellm"}]}', "its prompt was not stored"),
        ('{"prompt": ["a", "b"]}', "give a text"),
        ('{"body": {"prompt": ["a", "b"]}}', "several prompts at once: write each on a line"),
        ('{"call_type": "aembedding", "messages": "a"}', "1 request for embeddings"),
        ("TIMESTAMP,ContextTokens\nx,y\n", "ContextTokens is no number of tokens"),
        (b"\x1f\x8b\x08\x00", r"no text \(gzip\): unpack it"),
        (b"PAR1....", "Parquet"),
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        ("Dear log,\n", "neither JSON nor a line of vLLM's log: write one JSON object a line"),
        ('{"prompt": "a",}', "no JSON object from column 1. on: write each request on one line"),
    ],
)  # fmt: skip
def test_a_format_that_is_refused_gets_a_sentence_with_the_remedy(
    content: str | bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=f"has no prompts: .*{says}"):
        estimate(path, "docs-lm")


def test_older_logs_of_vllm(tmp_path: Path) -> None:
    old = (
        "INFO 08-12 10:00:00 logger.py:36] Received request cmpl-1: prompt: 'It\\'s, params: x', params: SamplingParams(n=1, stop=[]), "
        "prompt_token_ids: [1, 2], lora_request: None, prompt_adapter_request: None."
    )
    older = "INFO 01-02 10:00:00 async_llm_engine.py:428] Received request a: prompt: 'b', sampling_params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None."
    log = read(tmp_path / "log", old, older)
    assert [(sample.fields["prompt"], sample.fields["token_ids"]) for sample in samples(log)] == [
        ("It's, params: x", (1, 2)),
        ("b", ()),
    ]


@pytest.mark.parametrize(
    "text",
    ['{"prompt": "a"}\n{"prompt": "b"}\n', '[{"prompt": "a"}, {"prompt": "b"}]', "TIMESTAMP,ContextTokens\n1,5\n2,6\n"],
)
def test_a_byte_order_mark_costs_no_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + text.encode())
    log = RequestLog(tmp_path / "log")
    assert (len(list(log.entries())), log.unread) == (2, 0)
    assert sum(len(list(part.entries())) for part in log.parts(8)) == 2


def test_an_array_that_ends_early_loses_no_element_unnoticed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('[{"prompt": "a"}, {"prompt": "b"')
    log = RequestLog(tmp_path / "log")
    assert (len(list(log.entries())), log.unread) == (1, 1)


def test_what_a_trace_does_not_tell_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,480\n2023-11-16 19:17:04,110\n")
    found = estimate(tmp_path / "azure.csv", "docs-lm")
    names = ("tokens_prefix", "tokens_anywhere", "share_prefix", "share_anywhere")
    assert {name: found[name] for name in names} == dict.fromkeys(names)
    assert set(found["computed"]) == {"full"}
    stood = {row[0]: row[1] for row in sheets(found)[0].rows}
    assert set(stood.values()) == {"unknown"}
    assert "0%" not in str(savings_sentences(found))

    read(tmp_path / "mooncake", *({"timestamp": n, "input_length": 600, "hash_ids": [1, 10 + n]} for n in range(3)))
    found = estimate(tmp_path / "mooncake", "docs-lm")
    assert found["tokens_prefix"] == 2 * 512
    assert (found["tokens_anywhere"], found["share_anywhere"]) == (None, None)
    stood = {row[0]: row[1] for row in sheets(found)[0].rows}
    assert (stood["elsewhere in earlier prompts"], stood["new"]) == ("unknown", "unknown")


def test_what_requests_do_not_tell_is_said_of_those_alone(tmp_path: Path) -> None:
    whole = {"prompt": "a", "user": "u", "timestamp": 5}
    assert read(tmp_path / "log", whole, whole).left_out == []
    told = read(tmp_path / "log", whole, {"prompt": "b"}).left_out
    assert told == [
        "without partition or user: 1 of 2 requests, which count as one tenant's",
        "without a time: 1 of 2 requests, so all are taken in the order of the file",
    ]


NAMES_OF_FIELDS = st.sampled_from(
    "prompt question context messages input instructions system tools functions contents parts content text role type name arguments function "
    "tool_calls function_call functionCall functionResponse toolUse toolResult output result body request proxy_server_request kwargs data id "
    "hash_ids input_length timestamp startTime traceId call_type status error cache_hit level response status_code user partition token_ids "
    "image images source documents history message trajectory edit custom_id url model metadata raw answer documents lc".split()
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "system", "human", "tool", "function", "tool_use", "text", "GENERATION", "[1]", "{}", "\ud800", "NaN", "=1+1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES_OF_FIELDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


def whatever_happens(path: Path) -> None:
    """A log is estimated, or refused with a sentence of this package."""
    with suppress(DejaKVError):
        found = estimate(path, "docs-lm", max_samples=50)
        assert sheets(found)
        assert savings_sentences(found) is not None
        json.dumps(found).encode()


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(NAMES_OF_FIELDS, VALUES, max_size=6), max_size=5), st.booleans())
def test_no_record_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], array: bool
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_text(json.dumps(records) if array else "\n".join(map(json.dumps, records)))
    whatever_happens(path)


@settings(max_examples=120)
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([
            b"[", b"]", b"{", b"}", b'{"prompt": "a"}', b"TIMESTAMP,ContextTokens", b"1,2", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b'"',
            b"DEBUG 02-31 25:61:61 Request a details: prompt: 'a\\ud800', prompt_token_ids: [99999999999999999999], prompt_embeds",
            b"DEBUG 02-31 25:61:61 Request a details: prompt: f(, prompt_token_ids: None, prompt_embeds",
            b'Request a JSON body: {"prompt": [-1, true]}', b'{"hash_ids": [1e999], "input_length": NaN}', b'{"a":' * 3000,
            b'{"hash_ids": [], "input_length": 1e400}', b'{"prompt": "a", "token_ids": ["b"]}', b'{"prompt": "\\ud800"}',
        ]),
        max_size=8,
    ),
    st.sampled_from([b"\n", b"\r", b"\r\n", b"", b","]),
)  # fmt: skip
def test_no_file_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], end: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(end.join(pieces))
    whatever_happens(path)
