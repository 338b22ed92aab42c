"""Resets, pauses, sleeps and the stop of a server whose store is slow: whatever is answered, no old state is used, and the log says what is lost."""

import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from test_vllm_operator import as_documented, complete, documented_reset, post, stored
from tests.services import wait_until
from vllm_harness import server_flags, serving, tokens
from workers import SLOW, Delays


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
    flags = server_flags({"store": str(folder / "kv"), "load_timeout_s": 60})
    middleware = flags.index("--middleware")
    flags[middleware : middleware + 2] = ["--shutdown-timeout", "60", "--worker-extension-cls", SLOW]
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


# What a mode does with running requests does not matter to an idle server.
CASES = [("idle", operation) for operation in ("reset", "pause wait", "sleep wait")]
CASES += [(state, operation) for state in ("answering", "loading") for operation in OPERATIONS]


@pytest.mark.parametrize(("state", "operation"), CASES)
def test_in_every_state_we_are_reset_or_it_is_said_that_we_are_not(slow: Slow, state: str, operation: str) -> None:
    """With other weights from just before: old state is used in neither case, and after success new state is reused."""
    address, prompt = slow.address, tokens(200, zlib.crc32(f"{state} {operation}".encode()))
    complete(address, prompt, 1)
    stored(address, [prompt])
    answers: list[httpx.Response] = []
    if state != "idle":
        slow.delays.set(get_parts=2 if state == "loading" else 0)
        assert post(address, "/reset_prefix_cache").json()["success"]
        body = {"model": "docs", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=body, timeout=None))
        )
        asking.start()
        wait_until(lambda: slow.delays.waiting if state == "loading" else runs(address), f"a request that is {state}")
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


def runs(address: str) -> bool:
    """Whether a request runs, by vLLM's own figures."""
    lines = httpx.get(f"{address}/metrics", timeout=None).text.splitlines()
    return any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines)
