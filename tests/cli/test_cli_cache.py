"""`dejakv cache`: purging a folder from the command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.encoder_cache import VisualKVCache
from dejakv.http.keys import ApiKeys
from dejakv.identity import MediumSpan
from dejakv.store import open_store
from dejakv.testing.stored_states import ids, make_prompt_state
from dejakv.trust.draw import ClassKey
from dejakv.trust.evidence import HitCounts
from dejakv.trust.ledger import EvidenceLedger

PICTURE = "a" * 64
DONOR = make_prompt_state((1, 9, 9, 3), spans=(MediumSpan(1, 2, PICTURE),))
OTHER = make_prompt_state((4, 5, 6), partition="q")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "cache")
    assert store.put(DONOR)
    assert store.put(OTHER)
    store.close()
    return tmp_path / "cache"


def purge(*arguments: object) -> str:
    result = CliRunner().invoke(typer_app, ["cache", "purge", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def left(folder: Path) -> set[str]:
    store = open_store(folder)
    found = ids(store)
    store.close()
    return found


def test_a_dry_run_tells_and_removes_nothing(folder: Path) -> None:
    said = purge("--cache-dir", folder, "--partition", "p", "--dry-run")
    assert said.startswith("would remove 1 prompt, ")
    assert left(folder) == {DONOR.meta.id, OTHER.meta.id}


def test_a_partition(folder: Path) -> None:
    assert purge("--cache-dir", folder, "--partition", "p").startswith("removed 1 prompt, ")
    assert left(folder) == {OTHER.meta.id}


def test_a_donor_with_the_outputs_of_its_pictures(folder: Path, tmp_path: Path) -> None:
    import numpy as np

    outputs = VisualKVCache(disk=tmp_path / "outputs")
    for partition, content in (("p", PICTURE), ("p", "b" * 64), ("q", PICTURE)):
        outputs.view("encoder", partition).store(content, "image", np.ones((2, 3), np.float32))
    outputs.close()
    said = purge("--cache-dir", folder, "--cache-dir", tmp_path / "outputs", "--donor", DONOR.meta.id)
    assert "1 prompt" in said
    assert "1 encoder output," in said
    again = VisualKVCache(disk=tmp_path / "outputs")
    found = [
        again.view("encoder", p).lookup(c) is not None for p, c in (("p", PICTURE), ("p", "b" * 64), ("q", PICTURE))
    ]
    assert found == [False, True, True]
    again.close()


def test_the_partitions_of_keys_are_those_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\nbeta\n")
    said = CliRunner().invoke(typer_app, ["cache", "partition", "--api-keys-file", str(tmp_path / "keys")]).output
    keys = ApiKeys(["alpha", "beta"])
    assert said.split() == [*keys.names]
    assert "alpha" not in said


def test_show_tells_what_is_in_the_folder(folder: Path) -> None:
    done = CliRunner().invoke(typer_app, ["cache", "show", str(folder)], env={"COLUMNS": "40"})
    assert done.exit_code == 0, done.exception
    assert "2 prompts, " in done.output
    for meta in (DONOR.meta, OTHER.meta):
        assert any(meta.partition in line and meta.epoch in line for line in done.output.splitlines())
    assert left(folder) == {DONOR.meta.id, OTHER.meta.id}


def test_a_stored_name_does_not_control_the_terminal(tmp_path: Path) -> None:
    """Neither by a stored partition, nor by the name of a folder."""
    place = tmp_path / "a\x1b]0;b"
    store = open_store(place)
    assert store.put(make_prompt_state(range(40), partition="t\x1b[2J\u202eu"))
    store.close()
    ledger = EvidenceLedger(place, "terms")
    ledger.change(ClassKey("\x1b[2Je", "blend", "strict", "group"), lambda state: state.counted(HitCounts(explored=3)))
    ledger.close()
    for command in (["show", str(place)], ["evidence", "--cache-dir", str(place)]):
        done = CliRunner().invoke(typer_app, ["cache", *command])
        assert done.exit_code == 0, done.exception
        assert "\\x1b[2J" in done.output
        assert not {"\x1b", "\u202e"} & set(done.output)


def test_evidence_is_shown_and_removed(tmp_path: Path) -> None:
    command = ["cache", "evidence", "--cache-dir", str(tmp_path)]
    refused = CliRunner().invoke(typer_app, command)
    assert "has no evidence" in str(refused.exception)
    ledger = EvidenceLedger(tmp_path, "terms")
    for epoch in ("one", "two"):
        ledger.change(ClassKey(epoch, "blend", "strict", "group"), lambda state: state.counted(HitCounts(explored=3)))
    ledger.close()
    lines = CliRunner().invoke(typer_app, command).output.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["two", "one"]
    assert "blend (strict)" in lines[0]
    assert "3 labels, 0 wrong" in lines[0]
    assert (
        CliRunner().invoke(typer_app, [*command, "--epoch", "two", "--remove"]).output
        == "removed the evidence of 1 kind of hits\n"
    )
    assert len(CliRunner().invoke(typer_app, command).output.splitlines()) == 1
