"""The examples run as they are documented, and show what they claim."""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.services import Python, wait_until

from dejakv import SemanticCacheConfig, plugins
from dejakv_models.docs import DocsDataset, prompt

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints, in this process: an import of transformers takes longer than most of them."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [int(one) for one in found.groups()]


def test_quickstart() -> None:
    lines = run("quickstart.py").splitlines()
    assert lines[1].startswith("miss: ")
    assert lines[2].startswith("hit (text:exact): 1 of ") or lines[2].startswith("hit (prefix): 1 of ")


def test_own_pipeline() -> None:
    text = run("own_pipeline.py")
    assert "hit (same_words)" in text
    assert "40 lookups" in text


def test_own_method_answers_a_similar_prompt_without_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests see the registry as it was.
    monkeypatch.setattr(plugins, "_PARTS", {group: dict(parts) for group, parts in plugins._PARTS.items()})
    computed = [line.split()[:2] for line in run("own_method.py").splitlines()]
    assert [method for method, _ in computed] == ["none", "nearest_answer", "none"]
    assert computed[1][1] == "0"


def test_one_process_encodes_and_another_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Python] = []

    def start(command: list[str]) -> Python:
        started.append(Python(*command[1:]))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit) as ended:
        run("encoder_two_processes.py", "--questions", "6", "--folder", str(tmp_path / "outputs"))
    assert ended.value.code == 0, [process.ended().stderr for process in started]
    said = "".join(process.ended().stdout for process in started)
    (encoded,) = numbers(r"encoder process: (\d+) pictures", said)
    pattern = r"(\d+) questions, (\d+) right, (\d+) encoder runs, (\d+) from the folder"
    questions, right, runs, loaded = numbers(pattern, said)
    assert (questions, runs) == (6, 0)
    assert loaded == encoded > 0
    assert right >= 3, "answers from another process's outputs are those of the model"


def test_agents_encode_each_picture_once() -> None:
    said = run("agents_share_pictures.py", "--agents", "3", "--questions", "4")
    (pictures,) = numbers(r"(\d+) distinct pictures", said)
    assert f"without the cache: {3 * 4} encoder runs" in said
    assert f"with the cache:    {pictures} encoder runs" in said
    assert "answers that differ: 0" in said
    assert f"visual_encoder_runs = {pictures}" in said
    assert "--mm-encoder-tp-mode data" in said


def test_semsharekv_answers_an_edited_target_as_it_is_now() -> None:
    out = run("semsharekv.py")
    answers = re.findall(r"(blended|in full): (\d+) of (\d+) tokens computed, answer '(\w+)'", out)
    (_, few, tokens, blended), (_, all_of_them, _, full) = answers
    assert blended == full == "tokyo"
    assert int(few) < int(tokens) / 2
    assert all_of_them == tokens


def test_semsharekv_without_a_similar_prompt_computes_in_full() -> None:
    target = "<s> Nobody could say why. <q> Where does Ann live? <a>"
    assert "computed in full" in run("semsharekv.py", "--threshold", "1.0", "--target", target)


def test_sim_llm_shows_a_hit_with_the_answer_of_the_first() -> None:
    said = run("sim_llm.py", "--cases", "1", "--facts", "12", "--tail", "16", "--device", "cpu")
    first, again = (next(li for li in said.splitlines() if what in li) for what in ("a new task", "the same again"))
    assert "computed" in first
    assert re.search(r"from .*; 1 of ", again)
    assert first.split(": ")[1].split(" (")[0] == again.split(": ")[1].split(" (")[0]


@pytest.mark.parametrize(("demo", "shown"), [("similarity", "unrelated"), ("benchmark", "times as fast")])
def test_other_demos_of_sim_llm(demo: str, shown: str) -> None:
    assert shown in run("sim_llm.py", "--demo", demo, "--cases", "1", "--facts", "12", "--device", "cpu")


def test_a_mistake_names_the_cause() -> None:
    with pytest.raises(SystemExit, match=r"sim_llm: .*every layer attends to its own KV"):
        run("sim_llm.py", "--model", "docs-lm")


def test_a_service_of_fastapi_settles_while_nobody_asks() -> None:
    known = prompt(next(iter(DocsDataset(samples=1, facts=40))))
    edited = known.replace("<s> ", "<s> Nobody could say why. ", 1)
    create_app = runpy.run_path(str(EXAMPLES / "fastapi_service.py"))["create_app"]
    config = SemanticCacheConfig(reuse="blend", error_bound=0.05, costs=COSTS)
    with TestClient(create_app(config, settle_after=0.02)) as client:
        one, same, bounded = (
            client.post("/answer", json={"prompt": text, "max_new_tokens": 4}).json() for text in (known, known, edited)
        )
        assert (one["computed"], same["computed"]) == (one["of"], 1)
        assert not bounded["approximate"]
        assert "0 labels" in bounded["reason"]
        wait_until(lambda: client.get("/waiting").json() == 0, "the label")
        again = client.post("/answer", json={"prompt": edited.replace("why", "who"), "max_new_tokens": 4}).json()
        assert "1 labels" in again["reason"]


def test_settling_sends_the_prompt_that_was_asked_and_stores_no_more_than_it_may() -> None:
    """What shapes the prompt is sent as it is, what shapes the answer is not; the request's choices hold."""
    sent = list[dict[str, Any]]()

    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text='vllm:num_requests_running{engine="0"} 0.0')
        sent.append({"path": request.url.path, **json.loads(request.content)})
        return httpx.Response(200, json={})

    prompt = {
        "model": "m", "messages": [{"role": "user", "content": "hello"}], "cache_salt": "tenant",
        "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "a"}],
    }  # fmt: skip
    bodies = [
        {**prompt, "stream": True, "n": 4, "kv_transfer_params": {"dejakv": {"mode": "blend", "ttl": 60}}},
        {**prompt, "kv_transfer_params": {"dejakv": {"no_store": True}}},
        {**prompt, "kv_transfer_params": {"dejakv": "no_store"}},
        {"model": "m", "prompt": "hello", "max_completion_tokens": 9},
    ]
    settle = runpy.run_path(str(EXAMPLES / "vllm_settle.py"))["settle"]
    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(server)) as client:
        assert settle(client, bodies) == 2
        chosen = {"max_tokens": 1, "kv_transfer_params": {"dejakv": {"mode": "exact", "ttl": 60}}}
        assert sent[0] == {"path": "/v1/chat/completions", **prompt, **chosen}
        chosen["kv_transfer_params"] = {"dejakv": {"mode": "exact"}}
        assert sent[1] == {"path": "/v1/completions", "model": "m", "prompt": "hello", **chosen}
        settle(client, bodies[-1:], priority=7)
        assert sent[2]["priority"] == 7
