"""Runs that are stopped: what is on disk, what the report says, and what `resume` makes of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dejakv.engines.open import open_engine, open_templates
from dejakv.errors import ConfigError
from dejakv.experiments.run import run
from dejakv.experiments.samples import SamplePrompter, read_samples
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.experiments.shares import TokenShares
from dejakv.experiments.summary import RunProgress, SampleRow

SAMPLES, STOPPED = 8, 5


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    settings = settings_from("shapes", {}, {})
    return open_engine(settings, settings.cache)


def settings_for(folder: Path, **run_part: Any) -> RunSettings:
    return settings_from("shapes", {"max_samples": SAMPLES, "output": str(folder), **run_part}, {})


class StopAfter(RunProgress):
    """Interrupts as Ctrl-C does, after `samples` samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        if done == self.samples:
            raise KeyboardInterrupt


def interrupt() -> None:
    raise KeyboardInterrupt


def facts(folder: Path) -> list[Any]:
    """All that a run says of its samples, without times."""
    kept = ("method", "level", "provenance", "donor", "computed_tokens", "reused_tokens", "text", "first_token")
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [
        (line["id"], {arm: [values[name] for name in kept] for arm, values in line["arms"].items()}) for line in lines
    ]


@pytest.mark.parametrize("samples", [0, 6])
def test_the_shares_of_a_stopped_run_are_those_of_the_samples_that_it_served(
    engine: Any, tmp_path: Path, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path)
    prompter = SamplePrompter(open_templates(settings), settings.prompt_template, settings.chunk_source)
    shares = TokenShares()
    for sample in list(read_samples(settings))[:samples]:
        prepared = engine.prepare(prompter.request(sample))
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
    if samples == 0:
        monkeypatch.setattr(StopAfter, "stage", lambda self, text: interrupt())
    summary = run(settings, StopAfter(samples), engine=engine).summary
    assert summary["samples"] == samples
    assert (summary["share_prefix"], summary["share_anywhere"]) == (
        shares.total.share_prefix,
        shares.total.share_anywhere,
    )


@pytest.fixture(scope="module")
def whole(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run(settings_for(folder), engine=engine)
    return folder


@pytest.fixture(scope="module")
def stopped(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    run(settings_for(folder), StopAfter(STOPPED), engine=engine)
    return folder


@pytest.mark.parametrize(("cut", "torn"), [(0, b""), (0, b'{"id": "half a li'), (1, b"")])
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    engine: Any, whole: Path, stopped: Path, tmp_path: Path, cut: int, torn: bytes
) -> None:
    """A line that lacks its end, which a kill may leave, is measured again: the next one would stand on the same line."""
    parts = shutil.copytree(stopped, tmp_path / "parts")
    path = parts / "samples.jsonl"
    path.write_bytes(path.read_bytes()[: -cut or None] + torn)
    watch = StopAfter(0)
    result = run(settings_for(parts), watch, engine=engine, resume=True)
    assert not result.stopped
    assert any(f"{STOPPED - cut} prompts" in stage for stage in watch.stages)
    assert facts(parts) == facts(whole)
    assert json.loads((parts / "summary.json").read_text())["samples"] == SAMPLES


def test_resume_refuses_other_settings_and_other_samples(engine: Any, tmp_path: Path) -> None:
    run(settings_for(tmp_path), StopAfter(3), engine=engine)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        run(settings_for(tmp_path, max_new_tokens=9), engine=engine, resume=True)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ConfigError, match="another --output"):
        run(settings_for(tmp_path), engine=engine, resume=True)


def test_resume_without_an_output_or_settings(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output"):
        run(settings_from("shapes", {"max_samples": 2}, {}), engine=engine, resume=True)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="no run wrote"):
        run(settings_for(tmp_path), engine=engine, resume=True)
    assert (tmp_path / "samples.jsonl").read_text() == "{}\n"
    signed = tmp_path / "signed"
    run(settings_for(signed), StopAfter(2), engine=engine)
    (signed / "settings.json").unlink()
    with pytest.raises(ConfigError, match="without --resume"):
        run(settings_for(signed), engine=engine, resume=True)


class Meanwhile(RunProgress):
    """Begins another run in the same folder behind the third sample."""

    def __init__(self, settings: RunSettings, engine: Any) -> None:
        self.again = settings, engine
        self.said: list[str] = []

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        if done == 3:
            for resume in (True, False):
                with pytest.raises(ConfigError) as error:
                    run(self.again[0], engine=self.again[1], resume=resume)
                self.said.append(str(error.value))


def test_a_folder_has_one_run_at_a_time(engine: Any, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    meanwhile = Meanwhile(settings, engine)
    run(settings, meanwhile, engine=engine)
    assert len(meanwhile.said) == 2
    for said in meanwhile.said:
        assert "under way" in said
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == SAMPLES
    assert run(settings, engine=engine).earlier


@pytest.mark.parametrize(
    "line", [b"", b'{"id": "torn', b'{"id": "0", "error": "the prompt is too long", "arms": {}}\n'], ids=str
)
def test_a_run_that_measured_nothing_leaves_its_folder_to_the_corrected_command(
    engine: Any, tmp_path: Path, line: bytes
) -> None:
    class Fails(RunProgress):
        def stage(self, text: str) -> None:
            if text == "warming up":
                raise ConfigError("a setting that only the loaded model shows to be wrong")

    with pytest.raises(ConfigError, match="loaded model"):
        run(settings_for(tmp_path, max_new_tokens=3), Fails(), engine=engine)
    (tmp_path / "samples.jsonl").write_bytes(line)
    corrected = settings_for(tmp_path, max_samples=2)
    result = run(corrected, engine=engine)
    assert (result.earlier, len(facts(tmp_path))) == (False, 2)
    assert run(corrected, engine=engine).earlier
    with pytest.raises(ConfigError, match="other settings"):
        run(settings_for(tmp_path, max_samples=2, max_new_tokens=3), engine=engine)
