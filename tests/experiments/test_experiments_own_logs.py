"""Runs on a log of one's own: prompts that cannot run, prompts as they stand, and what was read of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError, InputError
from dejakv.experiments.estimate import estimate as tune
from dejakv.experiments.reports.report import make_report
from dejakv.experiments.reports.why import explain_sample
from dejakv.experiments.run import run
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.experiments.summary import RunProgress, SampleRow
from dejakv.experiments.table import show
from dejakv_models.docs import make_document, prompt_of

FEW = "<s> Ann lives in Paris. Bob lives in Rome. <q> Where does {} live? <a>"
TOO_LONG = "<s> " + "Ann lives in Paris. " * 2000 + "<q> Where does Ann live? <a>"
LOG: list[dict[str, object]] = [
    {"id": "one", "prompt": FEW.format("Ann")},
    {"id": "long", "prompt": TOO_LONG},
    {"id": "two", "prompt": FEW.format("Bob")},
    {"id": "longer", "prompt": TOO_LONG + " "},
    {"id": "three", "prompt": FEW.format("Ann")},
]


def log(folder: Path, records: list[dict[str, object]] = LOG) -> str:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings_for(path: str, **more: Any) -> RunSettings:
    given = {"model": "docs-lm", "dataset": "jsonl", "dataset_path": path, "max_new_tokens": 2, "raw_prompts": True}
    return settings_from(None, {**given, **more}, {})


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(summary, console=console)
    return console.export_text()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


class StopAfter(RunProgress):
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.seen: list[str] = []

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        if row is not None:
            self.seen.append(row.sample_id)
        if done == self.samples:
            raise KeyboardInterrupt


def test_a_prompt_longer_than_the_context_is_a_sample_that_could_not_run(docs_engine: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = run(settings_for(log(tmp_path), output=str(output)), engine=docs_engine)
    assert result.summary["samples"] == 3
    assert list(result.summary["not_run"]) == ["long", "longer"]
    assert result.summary["arms"]["none"]["prompt_tokens"] == 3 * result.rows[0].arms["none"].record.prompt_tokens
    lines = lines_of(output)
    assert [(line["id"], bool(line["error"])) for line in lines] == [
        ("one", False), ("long", True), ("two", False), ("longer", True), ("three", False),
    ]  # fmt: skip
    assert "the model's context" in lines[1]["error"]
    assert lines[4]["arms"]["cache"]["method"] == "exact"
    text = shown(result.summary)
    assert "2 samples could not run" in text
    assert f"long: {lines[1]['error']}" in text
    page = tmp_path / "report.html"
    make_report([output], page)
    assert "2 samples could not run" in page.read_text()
    assert explain_sample(output, "three").method == "exact"
    with pytest.raises(ConfigError, match="could not run"):
        explain_sample(output, "long")


def test_a_resumed_run_goes_past_it(docs_engine: Any, tmp_path: Path) -> None:
    settings = settings_for(log(tmp_path), output=str(tmp_path / "run"))
    assert run(settings, StopAfter(3), docs_engine).stopped
    watch = StopAfter(99)
    result = run(settings, watch, docs_engine, resume=True)
    assert watch.seen == ["longer", "three"]
    assert list(result.summary["not_run"]) == ["long", "longer"]
    assert lines_of(tmp_path / "run")[4]["arms"]["cache"]["method"] == "exact"


def test_a_run_in_which_none_can_run_is_an_error_that_names_the_first(docs_engine: Any, tmp_path: Path) -> None:
    path = log(tmp_path, [LOG[1], LOG[3]])
    for mode in ("live", "dry-run"):
        with pytest.raises(InputError, match="sample long could not run, nor any other of 2: the prompt has"):
            run(settings_for(path, cache_mode=mode), engine=docs_engine)


def test_raw_prompts_stand_as_they_are(docs_engine: Any, tmp_path: Path) -> None:
    import random

    document = make_document(random.Random(1), facts=5)
    prompt = prompt_of(document.text, "Where does Ann live?")
    records: list[dict[str, object]] = [{"prompt": prompt}, {"question": "Where does Bob live?"}]
    rows = run(settings_for(log(tmp_path, records)), engine=docs_engine).rows
    assert rows[0].arms["none"].record.prompt_tokens == len(docs_engine.tokenizer(prompt)["input_ids"])
    wrapped = run(settings_for(log(tmp_path, records), raw_prompts=False), engine=docs_engine).rows
    assert wrapped[0].arms["none"].record.prompt_tokens > rows[0].arms["none"].record.prompt_tokens
    assert wrapped[1].arms["none"].record.prompt_tokens == rows[1].arms["none"].record.prompt_tokens


def test_every_reader_of_a_log_takes_raw_prompts(tmp_path: Path) -> None:
    text = "Cats sleep for most of the day. " * 8
    path = log(tmp_path, [{"prompt": text}, {"prompt": text + "Why?"}])
    plain, raw = (tune(Path(path), "smollm2-135m", raw_prompts=raw) for raw in (False, True))
    assert raw["prompt_tokens"] < plain["prompt_tokens"]
    assert "--raw-prompts" in raw["command"]
    line = [
        "run",
        "--dataset",
        "jsonl",
        "--dataset-path",
        path,
        "--model",
        "docs-lm",
        "--cache-mode",
        "dry-run",
        "--raw-prompts",
    ]
    done = CliRunner().invoke(typer_app, [*line, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    shares = tune(Path(path), "docs-lm", raw_prompts=True)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["share_anywhere"] == shares["share_anywhere"]


def test_raw_prompts_of_a_data_set_without_prompts_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--raw-prompts is for prompts of a log"):
        settings_from("docs", {"raw_prompts": True}, {})


@pytest.mark.parametrize(("most", "says"), [(2, True), (3, False), (9, False)])
def test_a_log_that_is_not_read_to_its_end_is_told(tmp_path: Path, most: int, says: bool) -> None:
    path = log(tmp_path, [LOG[0], LOG[2], LOG[4]])
    line = ["run", "--dataset", "jsonl", "--dataset-path", path, "--model", "docs-lm", "--cache-mode", "dry-run"]
    done = CliRunner().invoke(typer_app, [*line, "--max-samples", str(most)])
    assert done.exit_code == 0, done.output
    told = f"read: {most} samples of log.jsonl, which has more: --max-samples N reads further"
    assert (told in done.output) is says
    notes = tune(Path(path), "smollm2-135m", max_samples=most)["notes"]
    assert (told in notes) is says


def test_a_fault_behind_the_samples_is_none_of_theirs(tmp_path: Path) -> None:
    path = Path(log(tmp_path, [LOG[0], LOG[2]]))
    path.write_text(path.read_text() + "{broken\n")
    line = ["run", "--dataset", "jsonl", "--dataset-path", str(path), "--model", "docs-lm", "--cache-mode", "dry-run"]
    done = CliRunner().invoke(typer_app, [*line, "--max-samples", "2"])
    assert done.exit_code == 0, done.output
    assert "left out: 1 line that cannot be read, the first at 3" in done.output


def test_a_resumed_run_may_find_that_its_log_grew(docs_engine: Any, tmp_path: Path) -> None:
    records = [LOG[0], LOG[2]]
    settings = settings_for(log(tmp_path, records), output=str(tmp_path / "run"), max_samples=2)
    assert run(settings, StopAfter(1), docs_engine).stopped
    log(tmp_path, [*records, LOG[4]])
    assert len(run(settings, engine=docs_engine, resume=True).rows) == 2


def test_the_prefix_arm_judges_where_there_is_none_other(docs_engine: Any, tmp_path: Path) -> None:
    """Its answers are full computation's."""
    path = log(tmp_path, [LOG[0], LOG[2], LOG[4]])
    summary = run(settings_for(path, arms=("prefix", "cache")), engine=docs_engine).summary
    assert (summary["agreement"], summary["agreement_first"]) == (1.0, 1.0)
    assert summary["kl_mean"] == pytest.approx(0.0, abs=1e-4)
    assert [level["judged"] for level in summary["by_level"].values()] == [1]
    assert "the whole answer in 3 (95%" in shown(summary)
