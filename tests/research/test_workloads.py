"""The comparison of `make workloads`, on the bundled documents model: kills, foreign folders, and the report's numbers."""

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from research.workloads import report
from research.workloads.__main__ import main
from research.workloads.measure import finished, measure
from research.workloads.streams import Stream, stream_of
from tests.services import python

from dejakv.blend.settings import QUALITIES
from dejakv.errors import ConfigError
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import RunProgress

REQUESTS = 6
ARMS = ("none", "prefix", *QUALITIES)


def stream_of_documents(requests: int = REQUESTS, lengths: tuple[int, int] = (150, 4_000)) -> Stream:
    return Stream(
        settings_from(
            "docs", {"dtype": "fp32", "max_samples": 40}, {"min_gain_share": 0.0, "costs": (1e-4, 0.0, 0.0, 0.0)}
        ),
        requests,
        lengths,
    )


@pytest.fixture(scope="module")
def whole(docs_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing stopped."""
    output = tmp_path_factory.mktemp("whole")
    assert measure(stream_of_documents(), output, RunProgress(), docs_engine)
    return output


def lines_of(output: Path) -> list[dict[str, Any]]:
    text = (output / "docs-transformers-6" / "samples.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def facts(output: Path) -> list[Any]:
    """All that the rows say, without times."""
    kept = ("method", "level", "donor", "computed_tokens", "reused_tokens", "reason", "text", "first_token", "fidelity")
    return [
        (line["id"], {arm: [values[name] for name in kept] for arm, values in line["arms"].items()})
        for line in lines_of(output)
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from research.workloads.measure import measure
from research.workloads.streams import Stream
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import RunProgress

class Killed(RunProgress):
    def sample(self, done, total, row):
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)

settings = settings_from("docs", {"dtype": "fp32", "max_samples": 40}, {"min_gain_share": 0.0, "costs": (1e-4, 0.0, 0.0, 0.0)})
measure(Stream(settings, 6, (150, 4_000)), Path(sys.argv[1]), Killed())
"""


def test_a_killed_run_goes_on_and_gives_the_rows_of_one_that_was_not(
    whole: Path, docs_engine: Any, tmp_path: Path
) -> None:
    done = python("-c", KILLED, tmp_path, cwd=Path(__file__).parents[2])
    assert done.returncode == -9, done.stderr
    folder = tmp_path / "docs-transformers-6"
    before = lines_of(tmp_path)
    assert len(before) == 3
    assert (folder / "state").exists()
    assert not finished(stream_of_documents(), tmp_path)
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"id": "half of a li')
    assert measure(stream_of_documents(), tmp_path, RunProgress(), docs_engine)
    assert lines_of(tmp_path)[:3] == before
    assert facts(tmp_path) == facts(whole)
    assert finished(stream_of_documents(), tmp_path)
    assert not (folder / "state").exists()
    assert json.loads((folder / "summary.json").read_text())["resumed"]


def test_the_arms_are_served_from_stores_of_their_own(whole: Path) -> None:
    lines = lines_of(whole)
    assert [tuple(line["arms"]) for line in lines] == [ARMS] * REQUESTS
    first = lines[0]["arms"]
    assert all(values["computed_tokens"] == values["prompt_tokens"] for values in first.values())
    blended = {name: [line for line in lines if line["arms"][name]["method"] == "blend"] for name in QUALITIES}
    assert all(blended.values())
    strict, loose = (
        sum(line["arms"][name]["computed_tokens"] for line in blended[name]) / len(blended[name])
        for name in ("strict", "loose")
    )
    assert loose <= strict


def test_the_report_says_what_the_rows_say(whole: Path) -> None:
    arms = {name: [line["arms"][name] for line in lines_of(whole)] for name in ARMS}
    (summary,) = report.summaries(whole)
    found = summary["arms"]
    page = report.page([summary])
    prefix = [values["ttft_ms"] for values in arms["prefix"]]
    for name, rows in arms.items():
        computed = sum(values["computed_tokens"] for values in rows)
        mean = statistics.fmean(values["ttft_ms"] for values in rows)
        assert found[name]["computed_tokens"] == computed
        assert name in ("none", "prefix") or f"| {name} | {100 * found[name]['computed_of_prefix']:.1f}% |" in page
        assert found[name]["ttft_ms"]["mean"] == pytest.approx(mean)
        assert found[name]["ttft_ms"]["p50"] == pytest.approx(statistics.median(v["ttft_ms"] for v in rows))
        seconds = sum(values["latency_ms"] for values in rows) / 1e3
        assert found[name]["requests_per_second"] == pytest.approx(REQUESTS / seconds)
    for name in QUALITIES:
        rows, figures = arms[name], found[name]
        against = figures["ttft_against_prefix"]
        assert against["ratio"] == pytest.approx(sum(values["ttft_ms"] for values in rows) / sum(prefix))
        low, high = against["ratio_interval"]
        assert low <= against["ratio"] <= high
        assert f"{against['ratio']:.2f} ({low:.2f} to {high:.2f})" in page
        equal = sum(one["first_token"] == other["first_token"] for one, other in zip(rows, arms["none"], strict=True))
        assert figures["first_token_equal"] == equal
        assert f"| {equal}, {figures['answers_equal']} of {REQUESTS} |" in page
        assert figures["answers_equal"] == sum(
            one["text"] == other["text"] for one, other in zip(rows, arms["none"], strict=True)
        )
        assert figures["kl_mean"] == pytest.approx(statistics.fmean(values["fidelity"]["kl"] for values in rows))
        missed = [
            (own["ttft_ms"], base)
            for own, base in zip(rows, prefix, strict=True)
            if own["method"] in ("none", "prefix")
        ]
        assert figures["missed"]["requests"] == len(missed)
        if len(missed) > 1:
            ratio = sum(own for own, _ in missed) / sum(base for _, base in missed)
            assert figures["missed"]["against_prefix"]["ratio"] == pytest.approx(ratio)
        assert summary["sizes"][name]["store_bytes"] > 0


def test_a_folder_of_other_settings_or_of_somebody_else_is_refused(
    whole: Path, docs_engine: Any, tmp_path: Path
) -> None:
    before = (whole / "docs-transformers-6" / "samples.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="other settings \\(lengths\\)"):
        measure(stream_of_documents(lengths=(150, 3_999)), whole, RunProgress(), docs_engine)
    with pytest.raises(ConfigError, match="other settings \\(lengths\\)"):
        finished(stream_of_documents(lengths=(150, 3_999)), whole)
    assert (whole / "docs-transformers-6" / "samples.jsonl").read_bytes() == before
    foreign = tmp_path / "docs-transformers-6"
    foreign.mkdir()
    (foreign / "samples.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="no run wrote"):
        measure(stream_of_documents(), tmp_path, RunProgress(), docs_engine)
    assert (foreign / "samples.jsonl").read_text() == "mine\n"
    (foreign / "samples.jsonl").unlink()
    (foreign / "state").mkdir()
    (foreign / "state" / "letter.txt").write_text("mine too")
    with pytest.raises(ConfigError, match="no run made it"):
        measure(stream_of_documents(), tmp_path, RunProgress(), docs_engine)
    assert (foreign / "state" / "letter.txt").read_text() == "mine too"


def test_the_command_writes_tables_and_picture(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", "--output", str(whole)]) == 0
    assert "workloads.md" in capsys.readouterr().out
    assert (whole / "workloads.md").read_text() == report.page(report.summaries(whole))
    assert json.loads((whole / "workloads.json").read_text())["streams"] == report.summaries(whole)
    assert (whole / "workloads.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert ElementTree.parse(whole / "workloads.svg").getroot().tag.endswith("svg")
    svg = (whole / "workloads.svg").read_bytes()
    assert report.draw(report.summaries(whole), whole)
    assert (whole / "workloads.svg").read_bytes() == svg


def test_answers_in_bf16_are_compared_with_the_same_requests_in_fp32(whole: Path, tmp_path: Path) -> None:
    stream = stream_of("rag", "vllm", rounded=True)
    assert (stream.name, stream.settings.dtype, list(stream.arms)) == ("rag-vllm-bf16", "bf16", ["none", "prefix"])
    shutil.copytree(whole, tmp_path / "both")
    folder = tmp_path / "both" / "docs-transformers-6"
    shutil.copytree(folder, other := folder.with_name("docs-transformers-6-bf16"))
    lines = lines_of(whole)
    lines[2]["arms"]["none"]["text"] += "?"
    lines[4]["arms"]["none"] |= {"text": "no", "first_token": -1}
    (other / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = json.loads((other / "summary.json").read_text()) | {"dtype": "bf16"}
    (other / "summary.json").write_text(json.dumps(told))
    (summary,) = report.summaries(tmp_path / "both")
    assert summary["rounded"] == [5, 4, 6]
    assert "| docs, transformers, 6 | bf16 | - | - | 5, 4 of 6 | - |" in report.page([summary])


def test_arms_that_were_chosen_stand_beside_prefix_caching_alone(docs_engine: Any, tmp_path: Path) -> None:
    stream = replace(stream_of_documents(), only=stream_of("rag", "transformers", 5, only=["default"]).only)
    assert measure(stream, tmp_path, RunProgress(), docs_engine)
    (summary,) = report.summaries(tmp_path)
    assert list(summary["arms"]) == ["prefix", "default"]
    assert summary["arms"]["default"]["first_token_equal"] is None
    assert report.page([summary]).count("| docs, transformers, 6 |") == 1
    assert report.draw([summary], tmp_path)
