"""`dejakv serve` as a process: what it says at its start and end."""

import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from tests.serving import heeds_ctrl_c

from dejakv.server.app import bound

SERVE = [sys.executable, "-m", "dejakv", "serve", "--model", "docs-lm"]


def free_port() -> int:
    with bound("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def test_it_tells_its_address_and_ends_with_ctrl_c() -> None:
    running = subprocess.Popen(
        [*SERVE, "--port", str(free_port())], stderr=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c
    )
    assert running.stderr is not None
    lines = iter(running.stderr.readline, "")
    address = next(
        found[1] for line in lines if (found := re.search(r"serving docs-lm on (http://127.0.0.1:\d+);", line))
    )
    assert any("startup complete" in line for line in lines)
    with urllib.request.urlopen(f"{address}/ready") as answer:
        assert answer.status == 200
    running.send_signal(signal.SIGINT)
    _, rest = running.communicate()
    assert running.returncode == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DEJAKV_MAX_PICTURES", "many", "DEJAKV_MAX_PICTURES: "),
    ],
)
def test_a_wrong_variable_is_one_line(variable: str, value: str, says: str) -> None:
    done = subprocess.run(SERVE, env={**os.environ, variable: value}, capture_output=True, text=True)
    assert done.returncode == 2
    (only,) = done.stderr.splitlines()
    assert only.startswith("dejakv: ")
    assert says in only
