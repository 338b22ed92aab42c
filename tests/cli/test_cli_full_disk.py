"""`dejakv run` where a disk fills up: the samples' and the cache's."""

import json
import os
import subprocess
from pathlib import Path

from tests.services import python
from typer.testing import CliRunner

from dejakv.cli.main import typer_app

LIMITED = """
import os, resource, signal, sys
from dejakv.cli.main import app
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["SIZE"]), -1))
app()
"""


def arguments(folder: Path, *flags: str) -> list[str]:
    """Arguments of a run over six questions."""
    data = folder / "log.jsonl"
    names = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Fay")
    data.write_text("".join(json.dumps({"question": f"Where does {name} live?"}) + "\n" for name in names))
    dataset = ["--dataset", "jsonl", "--dataset-path", str(data)]
    return ["run", "--model", "docs-lm", *dataset, "--max-new-tokens", "2", *flags]


def limited(size: int, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """A run by a process that may write no file larger than `size`, as a full disk would refuse it."""
    return python("-c", LIMITED, *arguments(folder, *flags), environment={**os.environ, "SIZE": str(size)})


def test_a_full_disk_under_the_samples_is_one_line_and_resume_goes_on(tmp_path: Path) -> None:
    flags = ("--output", str(tmp_path / "out"), "--arms", "none", "--repeat", "5")
    done = limited(8_000, tmp_path, *flags)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("dejakv: ")]
    assert len(said) == 1
    assert "free some space" in said[0]
    assert "--resume" in said[0]
    again = CliRunner().invoke(typer_app, arguments(tmp_path, *flags, "--resume"))
    assert again.exit_code == 0, again.output
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == len(lines) == 30


def test_a_full_disk_under_the_cache_is_told_once_and_counted(tmp_path: Path) -> None:
    output = tmp_path / "out"
    flags = ("--output", str(output), "--cache-dir", str(tmp_path / "cache"), "--disable-semantic-cache")
    done = limited(160_000, tmp_path, *flags, "--arms", "none,cache")
    assert done.returncode == 0, done.stderr
    failed = json.loads((output / "summary.json").read_text())["failed_writes"]
    assert sum(failed.values()) > 1
    assert done.stderr.count("state is not stored (") == 1
    assert f"WARNING {sum(failed.values())} writes of state failed" in done.stdout
