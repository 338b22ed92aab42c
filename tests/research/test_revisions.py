"""`research.revisions`: two revisions in turns."""

import json
from pathlib import Path

import pytest
from research.revisions import Part, PartRun

from research import revisions


def test_turns_change_who_begins() -> None:
    assert revisions.turns(2) == ["before", "after", "after", "before"]


def test_compare_pairs_times_and_answers_in_their_order() -> None:
    before = [PartRun({"hit": [10, 20]}, {"tokens": 5}, {"hit": ["a", "b"]}), PartRun({"hit": [40, 10]})]
    after = [PartRun({"hit": [5, 20]}, {"tokens": 4}, {"hit": ["a", "c"]}), PartRun({"hit": [80, 10]})]
    figures = revisions.compare(before, after)
    hit = figures["times"]["hit"]
    assert hit["ratio"]["p50"] == 1
    assert hit["pairs"] == 4
    assert (hit["before"], hit["after"]) == (15, 15)
    assert figures["counts"] == {"tokens": {"before": 5, "after": 4}}
    assert figures["answers_equal"] == {"hit": {"equal": 1, "of": 2}}


def test_main_runs_each_revision_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "import json, os, sys; json.dump(os.environ['PYTHONPATH'], open(sys.argv[1], 'w'))"
    part = Part(
        lambda model, path: ["-c", place, str(path)],
        lambda path: PartRun({"run": [1.0]}, {}, {"place": [json.loads(path.read_text())]}),
    )
    monkeypatch.setattr(revisions, "PARTS", {"place": part})
    revisions.main(tmp_path, tmp_path / "figures.json", parts="place")
    figures = json.loads((tmp_path / "figures.json").read_text())["parts"]["place"]
    assert figures["times"]["run"]["pairs"] == 2
    assert figures["answers_equal"]["place"] == {"equal": 0, "of": 1}


def test_main_names_the_folder_of_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(lambda model, path: ["-c", "raise ValueError('no such part')"], lambda path: PartRun())
    monkeypatch.setattr(revisions, "PARTS", {"broken": part})
    with pytest.raises(SystemExit, match="no such part"):
        revisions.main(tmp_path, tmp_path / "figures.json", parts="broken")
