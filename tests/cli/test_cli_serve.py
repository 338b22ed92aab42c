"""`dejakv serve` as a process: what it says at its start and end."""

import os
import re
import signal
import urllib.request

import pytest
from tests.services import Python, free_ports, python
from tests.serving import until

SERVE = ["-m", "dejakv", "serve", "--model", "docs-lm"]


def test_it_tells_its_address_and_ends_with_ctrl_c() -> None:
    running = Python(*SERVE, "--port", str(free_ports(1)[0]))
    until(lambda: running.poll() is not None or "startup complete" in running.errors.read_text())
    said = running.errors.read_text()
    announced = re.search(r"serving docs-lm on (http://127.0.0.1:\d+);", said)
    assert announced is not None, said
    assert announced.end() < said.index("startup complete")
    address = announced[1]
    with urllib.request.urlopen(f"{address}/ready") as answer:
        assert answer.status == 200
    running.send_signal(signal.SIGINT)
    ended = running.ended()
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DEJAKV_MAX_PICTURES", "many", "DEJAKV_MAX_PICTURES: "),
    ],
)
def test_a_wrong_variable_is_one_line(variable: str, value: str, says: str) -> None:
    done = python(*SERVE, environment={**os.environ, variable: value})
    assert done.returncode == 2
    (only,) = done.stderr.splitlines()
    assert only.startswith("dejakv: ")
    assert says in only
