"""`dejakv attack` as a user meets it: its mistakes, its exit codes and its files."""

import http.server
import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving import Running

from dejakv.attack import suite
from dejakv.attack.base import Result, judged
from dejakv.cli.main import app
from dejakv.server.settings import ServerSettings


def ran(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """Exit code, standard output, and lines on standard error."""
    monkeypatch.setattr(sys, "argv", ["dejakv", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        app()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


MISTAKES = [
    ("attack", "Missing option"),
    ("attack --output there.json", "exists and is not overwritten"),
    ("attack --output file/new.json", "--output"),
    ("attack --output new.json --only nothing", "choose from key collision"),
    ("attack --output new.json --server nowhere", "no address of a server"),
    ("attack --output new.json --server ftp://127.0.0.1/", "no address of a server"),
    ("attack --output new.json --server http://", "no address of a server"),
    ("attack --output new.json --server http://127.0.0.1:99999", "no address of a server"),
    ("attack --output new.json --server 'http://[::1'", "no address of a server"),
    ("attack --output new.json --server http://key@127.0.0.1:8008", "no address of a server"),
    ("attack --output new.json --server http://example.org", "add --yes"),
    ("attack --output new.json --server http://10.0.0.1:8008 --api-key a", "add --yes"),
    ("attack --output new.json --server http://127.0.0.1:8008 --other-key b", "give --api-key too"),
    ("attack --output new.json --server http://127.0.0.1:8008 --api-key a --other-key a", "same key"),
    ("attack --output new.json --api-key a", "give --server URL too"),
    ("attack --output new.json --yes", "give it too"),
    ("attack --output new.json --model no-such-model --only 'key collision'", "no-such-model"),
    ("attack --output new.json --seed many", "valid integer"),
]


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=[line[:70] for line, _ in MISTAKES])
def test_a_mistake(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    code, _, error = ran(line, monkeypatch, capsys)
    assert code == 2
    assert error.splitlines()[-1].startswith("dejakv: ")
    assert says in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there.json"]


def test_a_server_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    code, out, error = ran(f"attack --server {url} --output {tmp_path / 'new.json'}", monkeypatch, capsys)
    assert code == 2
    assert "does not answer" in error
    assert "at most 4000 requests, 20 a second" in out, "what is going to be sent is said before"


def test_a_server_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line = f"attack --server http://127.0.0.1:{server.server_port} --output {tmp_path / 'new.json'}"
        code, _, error = ran(line, monkeypatch, capsys)
        server.shutdown()
    assert code == 2
    assert "no server of DejaKV" in error


@pytest.fixture(scope="module")
def server(docs_engine: Any) -> Iterator[Running]:
    with Running(ServerSettings(api_keys="alpha,beta"), docs_engine) as running:
        yield running


@pytest.mark.parametrize(
    ("keys", "says"), [("", "refuses"), ("--api-key x", "--api-key"), ("--api-key alpha --other-key x", "--other-key")]
)
def test_a_server_that_refuses_the_keys(
    server: Running,
    keys: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, error = ran(f"attack --server {server.url} {keys} --output {tmp_path / 'new.json'}", monkeypatch, capsys)
    assert code == 2
    assert says in error
    assert not list(tmp_path.iterdir())


def test_a_server_is_attacked_and_the_report_is_written(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "attack.json"
    line = (
        f"attack --quick --server {server.url} --api-key alpha --only 'hostile inputs' --only leakage --output {path}"
    )
    code, _, error = ran(line, monkeypatch, capsys)
    assert code == 2
    assert "'leakage' is no attack" in error
    code, out, _ = ran(line.replace("leakage", "'hostile folder'"), monkeypatch, capsys)
    assert code == 0, out
    found = json.loads(path.read_text())
    assert {one["name"]: one["verdict"] for one in found["attacks"]} == {
        "hostile folder": "not applicable", "hostile inputs": "held",
    }  # fmt: skip
    assert (found["model"], found["server"], found["broken"]) == ("docs-lm", True, [])
    assert "alpha" not in path.read_text(), "keys are no part of a report"


class Broken:
    name, tries, broken_if, outside = "a hole", "everything", "anything", False

    def run(self, _scene: Any) -> Result:
        return judged("one thing", ["[red]it broke[/]"], {"share": 0.5})


def test_what_is_broken_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "ATTACKS", (Broken(),))
    path = tmp_path / "attack.json"
    code, out, _ = ran(f"attack --quick --output {path}", monkeypatch, capsys)
    assert code == 1
    assert "broken" in out
    assert "[red]it" in out
    assert json.loads(path.read_text())["attacks"][0]["findings"] == ["[red]it broke[/]"]
