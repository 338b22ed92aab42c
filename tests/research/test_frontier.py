"""The frontier: what a run writes, that a stopped one goes on, and its command."""

import json
from pathlib import Path

import pytest
from research.command import app_of
from research.frontier.__main__ import frontier
from research.frontier.bench import Bench
from research.frontier.cases import make_case
from research.frontier.cells import cells
from research.frontier.run import run_frontier
from typer.testing import CliRunner

from dejakv.errors import ConfigError
from dejakv.experiments.summary import Progress, Row

SOME = (
    "context/similarity/within/0",
    "context/similarity/need/0",
    "embedding/kv/share/0.2",
    "context/value/share/1",
)


def test_a_small_run_and_its_rows(tmp_path):
    report = run_frontier("docs-lm", 2, tmp_path, facts=6, kinds=("edit", "extend"), only=SOME)
    assert json.loads((tmp_path / "frontier.json").read_text()) == report
    rows = report["rows"]
    assert len(rows) == 2 * (len(SOME) + 1)
    for row in rows:
        assert row["n"] == 2
        assert 0 <= row["lo"] <= row["accuracy"] <= row["hi"] <= 1
        assert row["kl"] >= 0
        assert row["kl_mean_interval"][0] <= row["kl_mean"] <= row["kl_mean_interval"][1] + 1e-5
        assert row["ttft_ratio"] > 0
    edits = {(row["selector"], row["budget"], row["share"]): row for row in rows if row["kind"] == "edit"}
    assert edits["full", "share", 1.0]["stale_rate"] == 0.0
    # Nothing but the question computed: answered as before the edit. By need: as it is.
    assert edits["similarity", "within", 0.0]["stale_rate"] == 1.0
    assert edits["similarity", "need", 0.0]["stale_rate"] == 0.0
    assert edits["similarity", "need", 0.0]["accuracy"] == edits["full", "share", 1.0]["accuracy"]
    assert edits["value", "share", 1.0]["kl"] < 1e-5
    assert edits["value", "share", 1.0]["mean_share"] == 1.0
    assert "| 100% |" in (tmp_path / "frontier-table.md").read_text()


class Counting(Progress):
    """Notes how far the work is."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self.seen = seen

    def sample(self, done: int, total: int, row: Row | None) -> None:
        self.seen.append((done, total))


def test_a_stopped_run_goes_on_and_other_settings_are_refused(tmp_path):
    seen: list[tuple[int, int]] = []
    given = {"facts": 5, "kinds": ("merge",), "only": SOME[:2]}
    run_frontier("docs-lm", 2, tmp_path, **given, watch=Counting(seen))
    assert seen == [(1, 2), (2, 2)]
    cases = tmp_path / "cases.jsonl"
    whole = cases.read_text()
    cases.write_text(whole[: len(whole) - 40])  # the second case was cut off
    seen.clear()
    run_frontier("docs-lm", 3, tmp_path, **given, watch=Counting(seen))
    assert seen == [(1, 2), (2, 2)]
    lines = [json.loads(line) for line in cases.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert lines[0]["rows"].keys() == lines[2]["rows"].keys()
    with pytest.raises(ConfigError, match="other settings"):
        run_frontier("docs-lm", 2, tmp_path, **{**given, "facts": 6})


def test_cells_left_out_at_first_are_added_later(tmp_path):
    given = {"facts": 5, "kinds": ("reorder",), "only": (SOME[1], "lsh/value/share/0.2")}
    first = run_frontier("docs-lm", 2, tmp_path, **given, detail=1)
    assert [row["n"] for row in first["rows"]] == [2, 2, 1]
    later = run_frontier("docs-lm", 2, tmp_path, **given)
    assert [row["n"] for row in later["rows"]] == [2, 2, 2]
    assert later["rows"][1] == first["rows"][1]
    assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == 3


def test_other_ways_are_measured_in_the_same_folder_later(tmp_path):
    given = {"facts": 5, "kinds": ("reorder",)}
    run_frontier("docs-lm", 1, tmp_path, **given, only=SOME[:1])
    later = run_frontier("docs-lm", 1, tmp_path, **given, only=SOME[2:3])
    assert [row["selector"] for row in later["rows"]] == ["full", "kv"]
    assert json.loads((tmp_path / "settings.json").read_text())["cells"] == [SOME[0], SOME[2]]
    both = run_frontier("docs-lm", 1, tmp_path, **given, only=SOME[:3:2])
    assert len(both["rows"]) == 3
    assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == 2


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 1 sample"):
        run_frontier("docs-lm", 0, tmp_path)
    with pytest.raises(ConfigError, match="out of range"):
        run_frontier("docs-lm", 1, tmp_path, shares=(2.0,))
    with pytest.raises(ConfigError, match="choose from"):
        run_frontier("docs-lm", 1, tmp_path, only=("best",))


def test_the_command_names_what_it_wrote(tmp_path):
    app, runner = app_of(frontier), CliRunner()
    line = ["--samples", "1", "--kind", "merge", "--only", SOME[0], "--facts", "5"]
    small = runner.invoke(app, [*line, "--output", str(tmp_path / "small")])
    assert small.exit_code == 0, small.output
    promised = [name for name in small.stdout.replace(",", " ").split() if name.endswith((".json", ".md"))]
    assert [Path(name).name for name in promised] == ["frontier.json", "frontier-table.md"]
    assert all((tmp_path / "small" / Path(name).name).is_file() for name in promised)
    # No terminal here, as in a log: what is being done is told in lines.
    assert small.stderr.splitlines()[:2] == ["loading docs-lm", "docs-lm: 1 case to measure"]
    wrong = runner.invoke(app, ["--kind", "better", "--output", str(tmp_path)])
    assert "--kind 'better' is unknown" in str(wrong.exception)


def test_the_bench_measures_full_prefill_as_the_engine_answers():
    from dejakv.engines.transformers.engine import TransformersEngine

    bench = Bench(TransformersEngine.from_pretrained("docs-lm"), steps=2)
    case = make_case("reorder", 0, 6, bench.encode)
    rows = bench.run(case, [cell for cell in cells() if cell.share == 1.0])["rows"]
    assert rows["full"]["right"]
    assert (rows["full"]["kl"], rows["full"]["top1"]) == (0.0, 1.0)
    everything = rows["context/value/share/1"]
    assert everything["share"] == 1.0
    assert everything["kl_mean"] < 1e-5
