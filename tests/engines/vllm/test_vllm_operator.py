"""New weights in a running server, and resets in the words of the page: no old state is used."""

import re
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vllm_documented import PAGE, as_run, commands
from vllm_harness import DOCS, running, serving, tokens

PROMPTS = [tokens(200, seed) for seed in (1, 2, 3)]


def complete(
    address: str, prompt: list[int], count: int = 6, salt: str | None = None, **wish: Any
) -> tuple[str, dict[str, Any]]:
    """An answer's text, and what was told of it."""
    body: dict[str, Any] = {"model": "docs", "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "cache_salt": salt, "kv_transfer_params": {"dejakv": wish}}
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


def computed(address: str, salt: str) -> list[str]:
    """Answers of full computation with the weights of now."""
    return [complete(address, prompt, salt=salt, mode="off")[0] for prompt in PROMPTS]


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
    environment, arguments = as_run(commands()[0], tmp_path)
    assert "--worker-extension-cls" not in arguments
    arguments = [str(model) if word == str(DOCS) else word for word in arguments]
    [variable] = set(re.findall(r"`(VLLM_SERVER_DEV_MODE=1)`", PAGE.read_text()))
    environment |= dict([variable.split("=")])
    with serving(tmp_path, [*arguments, "--served-model-name", "docs"], environment) as address:
        stored(address, PROMPTS)
        before = computed(address, "before")
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
        expected = computed(address, "after")
    assert "weights were changed without a reset" in (tmp_path / "log").read_text()
    assert expected != before
    assert [text for text, _ in after] == again == expected


def test_the_documented_reset_of_an_offline_llm_resets() -> None:
    [line] = re.findall(r"`(llm\.reset_prefix_cache\([^`]*)`", PAGE.read_text())
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
    prompt = tokens(150, zlib.crc32(f"{reset} {count}".encode()))
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
