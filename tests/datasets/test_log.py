"""Logs of requests: each format by a sample of it, lines that cannot be read, and files that are read in pieces."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.datasets import log as log_module
from dejakv.datasets.entries import Entry
from dejakv.datasets.log import RequestLog
from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.errors import DatasetError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Ann?"}]
ASKED = (("system", "Be brief."), ("user", "Where is Ann?"))


def read(path: Path, *lines: Any) -> tuple[list[Entry], RequestLog]:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    log = RequestLog(path)
    return list(log.entries()), log


BATCH = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": CHAT}}
LANGFUSE = {
    "id": "g1", "traceId": "t1", "type": "GENERATION", "startTime": "2026-11-03T09:12:00.123Z", "userId": "u7",
    "model": "m", "input": {"messages": CHAT}, "output": {"role": "assistant", "content": "In Oslo."},
}  # fmt: skip
LITELLM = {
    "id": "c1", "call_type": "acompletion", "startTime": 1793697120.5, "messages": CHAT,
    "metadata": {"user_api_key_hash": "k1"}, "response": {}, "status": "success",
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "name", "tenant", "time"),
    [
        ({"messages": CHAT}, "JSON lines", "", None),
        ({"messages": CHAT, "partition": "p", "timestamp": 5, "topic": "t"}, "JSON lines", "p", 5.0),
        (BATCH, "OpenAI batch", "", None),
        (LANGFUSE, "Langfuse export", "u7", 1793697120.123),
        ({**LANGFUSE, "input": json.dumps(CHAT)}, "Langfuse export", "u7", 1793697120.123),
        ({**LANGFUSE, "input": CHAT, "startTime": "2026-11-03T10:12:00.123456789+01:00"}, "Langfuse export", "u7", 1793697120.123456),
        (LITELLM, "LiteLLM log", "k1", 1793697120.5),
        (
            {**LITELLM, "messages": "{}", "proxy_server_request": json.dumps({"model": "m", "messages": CHAT})},
            "LiteLLM log", "k1", 1793697120.5,
        ),
        (
            f'DEBUG 11-03 09:12:00.120 [request_logger.py:75] Request x JSON body: {json.dumps({"messages": CHAT})}',
            "vLLM's log", "", 973242720.0,
        ),
    ],
)  # fmt: skip
def test_conversations(line: Any, name: str, tenant: str, time: float | None, tmp_path: Path) -> None:
    [entry], log = read(tmp_path / "log", line)
    assert entry.sample is not None
    assert (entry.sample.messages, entry.format, entry.tenant) == (ASKED, name, tenant)
    assert entry.time == (None if time is None else pytest.approx(time, abs=1e-5))
    assert log.formats == {name: 1}
    assert not isinstance(line, dict) or entry.sample.fields.get("topic") == line.get("topic"), "for --chunk-source"
    assert entry.sample.fields.get("partition", "") == tenant


PROMPT = '<|user|>It\'s "Ann"\n'


@pytest.mark.parametrize(
    ("line", "prompt", "ids"),
    [
        ({"body": {"prompt": PROMPT}}, PROMPT, ()),
        ({"body": {"prompt": [1, 2, 3]}}, "", (1, 2, 3)),
        ({**LANGFUSE, "input": PROMPT}, PROMPT, ()),
        (
            f"DEBUG 11-03 09:12:00.120 [request_logger.py:50] Request cmpl-1-0 details: prompt: {PROMPT!r}, prompt_token_ids: [1, 22, 3], "
            "prompt_embeds shape: None.",
            PROMPT, (1, 22, 3),
        ),
        ("(APIServer pid=1) DEBUG 11-03 09:12:00 Request a details: prompt: None, prompt_token_ids: [4], prompt_embeds shape: None.", "", (4,)),
    ],
)  # fmt: skip
def test_prompts_as_the_model_reads_them(line: Any, prompt: str, ids: tuple[int, ...], tmp_path: Path) -> None:
    [entry], _ = read(tmp_path / "log", line)
    assert entry.sample is not None
    fields = entry.sample.fields
    assert (fields["prompt"], fields["token_ids"], fields["raw"]) == (prompt, ids, True)


def test_traces_have_no_text(tmp_path: Path) -> None:
    mooncake = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
    [entry], log = read(tmp_path / "mooncake.jsonl", mooncake)
    assert (entry.format, entry.blocks, entry.tokens, entry.time) == ("Mooncake trace", (46, 47, 2353), 6955, 27.482)
    with pytest.raises(DatasetError, match=r"prefix blocks alone.* it can be estimated, and not run"):
        list(log)
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04,x,1"
    [entry], log = read(tmp_path / "azure.csv", *azure)
    assert (entry.format, entry.tokens, entry.blocks) == ("Azure trace", 4808, ())
    assert entry.time == pytest.approx(1700158623.97996, abs=1e-4)
    assert log.broken == {3: "its ContextTokens is no number of tokens: give one from 1 on"}


def test_a_broken_line_costs_that_line(tmp_path: Path) -> None:
    secret = "my password"
    lines = [
        {"prompt": "a"}, '{"prompt": "my password', "my password", {"messages": [{"role": "user", "content": secret}, {"role": "no"}]},
        [secret], {"prompt": " "}, {"body": {}}, {**LITELLM, "messages": "{}"}, {"hash_ids": ["my password"], "input_length": 1}, "",
        '{"a":' * 100_000, {"prompt": "b"}, {"body": {"input": {"nothing": secret}}},
    ]  # fmt: skip
    entries, log = read(tmp_path / "log", *lines)
    assert [entry.sample.question for entry in entries if entry.sample] == ["a", "b"]
    assert sorted(log.broken) == [2, 3, 4, 5, 6, 7, 8, 9, 11, 13]
    assert "prompt was not stored" in log.broken[8]
    assert secret not in str(log.broken)


def test_what_is_no_request_is_skipped(tmp_path: Path) -> None:
    span = {**LANGFUSE, "type": "SPAN"}
    other = (
        "INFO 11-03 09:12:00 [request_logger.py:66] Received request a: params: SamplingParams(), lora_request: None."
    )
    entries, log = read(tmp_path / "log", span, other, LANGFUSE)
    assert (len(entries), log.skipped.total(), log.broken) == (1, 2, {})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=20).filter(str.strip), min_size=1, max_size=6), st.sampled_from([None, 1, "\t"]))
def test_an_array_reads_as_its_lines(tmp_path_factory: pytest.TempPathFactory, prompts: list[str], indent: Any) -> None:
    path = tmp_path_factory.mktemp("array") / "log.json"
    path.write_text(json.dumps([{"prompt": text + '"]},{', "x": [[1], {}]} for text in prompts], indent=indent))
    found = [entry.sample.question for entry in RequestLog(path).entries() if entry.sample]
    assert found == [text + '"]},{' for text in prompts]


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    for name, begin, between, end in (("lines", "", "\n", "\n"), ("array", "[", ",", "]")):
        path = tmp_path / name
        one = json.dumps({"prompt": "x" * 10_000})
        with path.open("w") as file:
            file.write(begin + between.join([one] * 500) + end)
        tracemalloc.start()
        assert sum(1 for _ in RequestLog(path).entries()) == 500
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 3 << 20, name


def test_what_cannot_be_read_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_LINE_CHARACTERS", 20_000)
    path = tmp_path / "log"
    with path.open("w") as file:
        for _ in range(50):
            file.write("x" * 200_000 + "\n")
        file.write("no\n" * 5_000 + '{"prompt": "a"}\n')
    tracemalloc.start()
    log = RequestLog(path)
    assert [entry.place for entry in log.entries()] == [5_051]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert (log.unread, len(log.broken)) == (5_050, 100)
    assert "5,050 lines that cannot be read, the first at 1" in log.left_out[0]


def test_a_tenants_key_is_told_by_its_digest(tmp_path: Path) -> None:
    entries, _ = read(tmp_path / "log", *({"prompt": "a", "api_key": key} for key in ("sk-1", "sk-2", "sk-1")))
    one, other, again = (entry.tenant for entry in entries)
    assert one == again != other
    assert not any("sk-" in str(entry.tenant) for entry in entries)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "it: a request must end with a user's"),
        ({"messages": 3}, "it has no conversation"),
        ({"question": 3}, "its 'prompt' or 'question' is no text"),
        ({"question": "x", "images": "a.png"}, "a list of paths as 'images'"),
        ({"question": "x", "image": "../a.png"}, "leaves the folder"),
        ({"question": "x", "image": "a.png"}, "a.png is not a readable image"),
        ({"question": "x", "image": "b.png"}, "cannot read the image b.png"),
    ],
)
def test_records_that_are_no_request(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    (tmp_path / "log").write_text(json.dumps(record))
    log = RequestLog(tmp_path / "log", tmp_path)
    assert list(log.entries()) == []
    assert says in log.broken[1]


def test_a_log_is_a_data_set(tmp_path: Path) -> None:
    read(tmp_path / "log", BATCH, "{")
    [sample] = open_dataset("log", DatasetOptions(path=str(tmp_path / "log")))
    assert (sample.id, sample.messages) == ("r-1", ASKED)
    with pytest.raises(DatasetError, match="no file"):
        open_dataset("log", DatasetOptions(path=str(tmp_path / "none")))
