"""Names of partitions that a folder does not tell: what a program calls a tenant stands nowhere in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.asking import EXACT, request, wordings
from typer.testing import CliRunner

from dejakv.build import build_cache
from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError, InputError
from dejakv.partition_names import SECRET, PartitionNames
from dejakv.pipeline import Pipeline
from dejakv.store.selection import Selection

NAME = "alice@example.org"
KEY = "a secret of some length"


def pipeline(engine: Any, folder: Path, names: PartitionNames | None) -> Pipeline:
    config = replace(EXACT, cache_dir=str(folder))
    return Pipeline(engine, build_cache(config, engine, background=False), names=names)


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def closed(made: Pipeline) -> None:
    assert made.cache is not None
    made.cache.close()


def test_a_name_stands_nowhere_in_the_folder(docs_engine: Any, tmp_path: Path) -> None:
    asked = request(wordings()[0], partition=NAME)
    for names, found in ((None, True), (PartitionNames(KEY), False)):
        folder = tmp_path / str(found)
        made = pipeline(docs_engine, folder, names)
        assert made.answer(asked).record.stored
        assert made.answer(asked).record.method == "exact"
        closed(made)
        assert (NAME.encode() in bytes_of(folder)) is found


def test_the_secret_finds_its_entries_again_and_another_does_not(docs_engine: Any, tmp_path: Path) -> None:
    asked = request(wordings()[0], partition=NAME)
    for secret, method in ((KEY, "none"), (KEY, "exact"), (KEY + "!", "none")):
        made = pipeline(docs_engine, tmp_path / "cache", PartitionNames(secret))
        assert made.answer(asked).record.method == method
        closed(made)


def test_a_purge_takes_the_programs_name(docs_engine: Any, tmp_path: Path) -> None:
    made = pipeline(docs_engine, tmp_path / "cache", PartitionNames(KEY))
    made.answer(request(wordings()[0], partition=NAME))
    assert made.purge(Selection("bob")).prompts == 0
    assert made.purge(Selection(NAME)).prompts == 1
    closed(made)


def test_old_folders_are_moved(docs_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored under a clear name is found under the other one, and the name has left the folder."""
    folder, asked = tmp_path / "cache", [request(words, partition=NAME) for words in wordings()]
    made = pipeline(docs_engine, folder, None)
    for one in asked:
        made.answer(one)
    made.answer(request(wordings()[0], partition="bob"))
    closed(made)
    monkeypatch.setenv(SECRET, KEY)
    told = CliRunner().invoke(typer_app, ["cache", "rename", "--cache-dir", str(folder), "--partition", NAME])
    assert told.exit_code == 0, told.output
    assert "moved 2 prompts" in told.output
    assert NAME.encode() not in bytes_of(folder)
    made = pipeline(docs_engine, folder, PartitionNames(KEY))
    for one in asked:
        answer = made.answer(one)
        assert answer.record.method == "exact"
        assert answer.token_ids == Pipeline(docs_engine).answer(one).token_ids
    closed(made)
    made = pipeline(docs_engine, folder, None)
    assert made.answer(request(wordings()[0], partition="bob")).record.method == "exact"
    closed(made)


def test_names_are_listed_for_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY)
    told = CliRunner().invoke(typer_app, ["cache", "partition", "--name", NAME])
    assert told.output.strip() == PartitionNames(KEY).stored(NAME)
    monkeypatch.delenv(SECRET)
    refused = CliRunner().invoke(typer_app, ["cache", "partition", "--name", NAME])
    assert isinstance(refused.exception, ConfigError)


def test_what_is_no_name_and_no_secret() -> None:
    with pytest.raises(ConfigError, match="give 16 or more"):
        PartitionNames("short")
    with pytest.raises(InputError):
        PartitionNames(KEY).stored("\ud800")
    assert PartitionNames(KEY).stored("default") == "default"
    assert PartitionNames(KEY).stored("a") != PartitionNames(KEY).stored("b")
