"""What an operator does to a running server: new weights, resets, pauses, sleeps and the stop. Whatever is answered, no old state is used."""

import re
import shlex
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_worker import EXTENSION, Delays
from test_vllm_documented import PAGE, as_run, commands
from vllm_harness import DOCS, running, server_flags, serving, tokens

PROMPTS = [tokens(200, seed) for seed in (1, 2, 3)]


def complete(address: str, prompt: list[int], count: int = 6, **wish: Any) -> tuple[str, dict[str, Any]]:
    """An answer's text, and what was told of it."""
    body = {"model": "docs", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body["kv_transfer_params"] = {"dejakv": wish}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["kv_transfer_params"]["dejakv"]


def post(address: str, path: str) -> httpx.Response:
    return httpx.post(f"{address}{path}", timeout=None)


def stored(address: str, prompts: list[list[int]]) -> None:
    """Ask until all are loaded from the store."""
    for prompt in prompts:
        while complete(address, prompt)[1]["method"] != "exact":
            assert post(address, "/reset_prefix_cache").json()["success"]


def answers_of(folder: Path) -> list[str]:
    """What vLLM alone answers."""
    with running(folder, connector=False) as engine:
        return [output.text for output in engine.ask(PROMPTS)]


def documented_reset() -> str:
    """The line of the page, and no other."""
    [line] = re.findall(r"^curl .*reset_prefix_cache.*$", PAGE.read_text(), re.MULTILINE)
    return line


def as_documented(line: str, address: str) -> str:
    """What the command prints, sent to this server."""
    words = shlex.split(line.replace("http://localhost:8000", address))
    done = subprocess.run([*words, "--silent", "--show-error", "--fail"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shift(file: Path) -> None:
    """Write other weights."""
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def test_the_documented_reset_resets(tmp_path: Path) -> None:
    """New weights in the folder, loaded again by vLLM's own call, in the page's first server: exact, without the worker extension."""
    model = tmp_path / "model"
    shutil.copytree(DOCS, model)
    before = answers_of(model)
    environment, arguments = as_run(commands()[0], tmp_path)
    assert "--worker-extension-cls" not in arguments
    arguments = [str(model) if word == str(DOCS) else word for word in arguments]
    [variable] = set(re.findall(r"`(VLLM_SERVER_DEV_MODE=1)`", PAGE.read_text()))
    environment |= dict([variable.split("=")])
    with serving(tmp_path, [*arguments, "--served-model-name", "docs"], environment) as address:
        stored(address, PROMPTS)
        assert [complete(address, prompt)[0] for prompt in PROMPTS] == before
        shift(model / "model.safetensors")
        reload = httpx.post(f"{address}/collective_rpc", json={"method": "reload_weights"}, timeout=None)
        assert reload.status_code == 200
        assert post(address, "/reset_prefix_cache").json()["success"], "vLLM's own cache, and not ours"
        complete(address, tokens(60, 9))  # the step in which it is noticed
        asked = [complete(address, prompt) for prompt in PROMPTS]
        assert [told["method"] for _, told in asked] == ["none"] * 3
        assert {told["reason"] for _, told in asked} == {"the weights were changed without a reset"}
        assert as_documented(documented_reset(), address) == '{"success":true}'
        after = [complete(address, prompt) for prompt in PROMPTS]
        assert [told["method"] for _, told in after] == ["none"] * 3
        stored(address, PROMPTS)
        again = [complete(address, prompt)[0] for prompt in PROMPTS]
    assert "weights were changed without a reset" in (tmp_path / "log").read_text()
    expected = answers_of(model)
    assert expected != before
    assert [text for text, _ in after] == again == expected


def test_the_documented_reset_of_an_offline_llm_resets() -> None:
    [line] = re.findall(r"^llm\.reset_prefix_cache\(.*$", PAGE.read_text(), re.MULTILINE)
    with running() as engine:
        engine.ask(PROMPTS)
        engine.settle()
        number = engine.connector.scheduler_side.generations.number
        names: dict[str, Any] = {"llm": engine.llm}
        exec(compile(f"answer = {line}", PAGE.name, "exec"), names)
        assert names["answer"] is True
        assert engine.connector.scheduler_side.generations.number == number + 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reset", ["reset_prefix_cache", "with the connector", "running", "sleep"])
def test_a_reset_in_process_needs_no_step(offline: Any, count: int, reset: str) -> None:
    """Right behind an answer: nobody makes a step for what waits for one."""
    prompt = tokens(150, len(reset) + count)
    offline.ask([prompt], max_tokens=count)
    if reset == "sleep":
        offline.llm.sleep(1)
        offline.llm.wake_up()
    else:
        assert offline.llm.reset_prefix_cache(reset == "running", reset == "with the connector")
    offline.settle()
    offline.reset_prefix_cache()
    (again,) = offline.ask([prompt], max_tokens=count, wish={"no_store": True})
    assert again.told["method"] == ("exact" if reset in ("reset_prefix_cache", "running") else again.told["method"])


@pytest.fixture(scope="module")
def offline() -> Iterator[Any]:
    with running() as engine:
        yield engine


@dataclass
class Slow:
    """A server whose store waits as long as it is told, and whose weights can be shifted."""

    address: str
    delays: Delays
    log: Path

    def shift(self) -> None:
        """Other weights, from one moment to the next."""
        done = httpx.post(f"{self.address}/collective_rpc", json={"method": "shift_weights"}, timeout=None)
        assert done.status_code == 200, done.text


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    folder = tmp_path_factory.mktemp("slow")
    delays = Delays(folder / "delays")
    flags = [*server_flags({"store": str(folder / "kv"), "load_timeout_s": 60}), "--shutdown-timeout", "60"]
    flags += ["--worker-extension-cls", EXTENSION]
    environment = {"VLLM_SERVER_DEV_MODE": "1", **delays.environment}
    with serving(folder, flags, environment) as address:
        yield Slow(address, delays, folder / "log")
        for number in range(8):
            complete(address, tokens(300, 50 + number), 2)
        delays.set(put=3)
        for number in range(8):
            complete(address, tokens(300, 70 + number), 2)
    log = (folder / "log").read_text()
    (begun,) = re.findall(r"stopping: (\d+) parts of prompts are still to be stored, for at most 8 s", log)
    (left,) = re.findall(r"stopped before (\d+) prompts? could be stored", log)
    assert 0 < int(left) < int(begun) + 1 <= 10
    assert delays.stored + int(left) >= 16, "each prompt is stored or said not to be"


OPERATIONS = {
    "reset": "/reset_prefix_cache?reset_external=true",
    "reset running": "/reset_prefix_cache?reset_external=true&reset_running_requests=true",
    **{f"pause {mode}": f"/pause?mode={mode}" for mode in ("abort", "wait", "keep")},
    **{f"sleep {mode}": f"/sleep?level=1&mode={mode}" for mode in ("abort", "wait", "keep")},
}
MAY_FAIL = {("loading", "reset running"), ("loading", "pause keep"), ("loading", "sleep keep")}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", ["idle", "answering", "loading"])
def test_in_every_state_we_are_reset_or_it_is_said_that_we_are_not(slow: Slow, state: str, operation: str) -> None:
    """With other weights from just before: old state is used in neither case, and after success new state is reused."""
    address, prompt = slow.address, tokens(200, zlib.crc32(f"{state} {operation}".encode()))
    complete(address, prompt, 1)
    stored(address, [prompt])
    answers: list[httpx.Response] = []
    if state != "idle":
        slow.delays.set(get_parts=2 if state == "loading" else 0)
        assert post(address, "/reset_prefix_cache").json()["success"]
        body = {"model": "docs", "prompt": prompt, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=body, timeout=None))
        )
        asking.start()
        wait_for(lambda: slow.delays.waiting if state == "loading" else "running" in load_of(address))
    slow.shift()
    done = post(address, OPERATIONS[operation])
    slow.delays.set(get_parts=0)
    if operation.startswith("pause"):
        assert post(address, "/resume").status_code == 200
    if operation.startswith("sleep"):
        assert post(address, "/wake_up").status_code == 200
    _, told = complete(address, prompt)
    assert told["method"] == "none", told
    if state != "idle":
        asking.join()
        assert answers[0].status_code == 200, answers[0].text
    succeeded = done.status_code == 200 and done.json().get("success", True)
    if not succeeded:
        assert (state, operation) in MAY_FAIL | {(state, "reset")}
        assert "without a reset" in told["reason"] or "reset again" in told["reason"], told
        assert as_documented(documented_reset(), address) == '{"success":true}'
    complete(address, prompt)
    stored(address, [prompt])


def load_of(address: str) -> str:
    """`running` if vLLM's own figures say that a request runs."""
    lines = httpx.get(f"{address}/metrics", timeout=None).text.splitlines()
    return (
        "running"
        if any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines)
        else ""
    )


def wait_for(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.01)
