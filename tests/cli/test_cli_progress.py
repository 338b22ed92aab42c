"""What a user sees while a run goes on: a log without a terminal, Ctrl-C and `--resume`."""

import io
import json
import signal
from pathlib import Path

from rich.console import Console
from tests.services import Python, python
from tests.serving import until

from dejakv.cli.progress import watching
from dejakv.experiments.summary import ArmOutcome, SampleRow
from dejakv.records import Record

COMMAND = ["-m", "dejakv.cli.main", "run", "--model", "docs-lm", "--arms", "none,cache"]
COMMAND += ["--max-samples", "400"]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ctrl_c_reports_what_is_done_and_resume_goes_on(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    running = Python(*COMMAND, "--output", str(tmp_path))
    until(lambda: lines_of(samples) >= 3 or running.poll() is not None)
    running.send_signal(signal.SIGINT)
    ended = running.ended()
    done = lines_of(samples)
    assert ended.returncode == 130, ended.stderr
    assert 3 <= done < 400
    assert "computed tokens" in ended.stdout
    assert "--resume" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == done

    again = Python(*COMMAND, "--output", str(tmp_path), "--resume")
    until(lambda: lines_of(samples) >= done + 3 or again.poll() is not None)
    again.send_signal(signal.SIGKILL)  # a run that is killed leaves its samples too
    again.wait()
    ids = [json.loads(line)["id"] for line in samples.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len(ids) >= done + 3
    assert len(set(ids)) == len(ids)


def test_ctrl_c_before_the_first_sample_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os, signal\n\ndef data(**_):\n    os.kill(os.getpid(), signal.SIGINT)\n")
    done = python(*COMMAND, "--dataset", "own:data", cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "dejakv: stopped"
    assert "Traceback" not in done.stderr


def row(ms: float) -> SampleRow:
    return SampleRow(
        "s",
        "q",
        None,
        {"none": ArmOutcome(Record("s", ttft_ms=ms), "a"), "cache": ArmOutcome(Record("s", ttft_ms=ms / 2), "a")},
    )


def test_without_a_terminal_progress_is_lines_that_count_from_each_stage() -> None:
    """As the experiments of a sweep follow each other."""
    out = io.StringIO()
    with watching(Console(file=out, width=80), seconds=0, counts="cases") as watch:
        watch.stage("loading a model")
        watch.sample(1, 4, row(100.0))
        watch.sample(2, 4, row(200.0))
        watch.stage("the next one")
        watch.sample(1, 8, row(500.0))
    lines = out.getvalue().splitlines()
    assert (lines[0], lines[3]) == ("loading a model", "the next one")
    assert lines[1] == "1 of 4 cases; mean TTFT ms: none 100, cache 50", "the first may have loaded a model"
    assert lines[2].startswith("2 of 4 cases, about ")
    assert lines[2].endswith("mean TTFT ms: none 150, cache 75")
    assert lines[4].startswith("1 of 8 cases")
    assert lines[4].endswith("mean TTFT ms: none 500, cache 250")


def test_lines_of_progress_are_seconds_apart() -> None:
    out = io.StringIO()
    with watching(Console(file=out, width=80), seconds=1000) as watch:
        watch.stage("loading a model")
        watch.sample(1, 4, row(100.0))
    assert out.getvalue() == "loading a model\n"


def test_samples_are_lines_when_asked_for() -> None:
    out = io.StringIO()
    with watching(Console(file=out, width=200), log_samples=True) as watch:
        watch.stage("serving")
        watch.sample(1, 2, row(100.0))
        watch.sample(2, 2, SampleRow("long", "q", None, error="the prompt has too many tokens"))
        watch.sample(2, 2, None)
    assert "[s] miss" in out.getvalue()
    assert "[long] could not run: the prompt has too many tokens" in out.getvalue()
