"""The frontier: what a run writes, that a stopped one goes on, and its command."""

import json
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dejakv.errors import ConfigError
from dejakv.experiments.frontier import run_frontier
from dejakv.experiments.frontier.bench import Bench
from dejakv.experiments.frontier.cells import cells
from dejakv.experiments.frontier.docs_cases import make_case
from dejakv.experiments.frontier.text_cases import TextCases
from dejakv.experiments.summary import Row
from dejakv.experiments.watch import Silent

SOME = (
    "context/similarity/within/0/0",
    "context/similarity/need/0/0",
    "embedding/kv/share/1/0.2",
    "context/value/share/1/1",
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
    assert (tmp_path / "frontier.png").stat().st_size > 1000


class Counting(Silent):
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
    given = {"facts": 5, "kinds": ("reorder",), "only": (SOME[1], "lsh/value/share/1/0.2")}
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


def test_a_kept_answer_saves_full_computation_and_gives_the_same_rows(tmp_path):
    from dejakv.engines.transformers.engine import TransformersEngine

    engine = TransformersEngine.from_pretrained("docs-lm")
    case = make_case("reorder", 1, 6, Bench(engine).encode)
    chosen = [cell for cell in cells() if cell.name == SOME[2]]
    first = Bench(engine, steps=2, answers=tmp_path / "answers").run(case, chosen)["rows"]
    (file,) = (tmp_path / "answers").iterdir()

    def measured(known):
        rows = Bench(engine, steps=2, answers=tmp_path / "answers").run(case, chosen, known)["rows"]
        return {name: {**row, "seconds": 0} for name, row in rows.items()}

    wanted = {name: {**row, "seconds": 0} for name, row in first.items()}
    assert measured(()) == wanted
    assert measured(("full",)) == {SOME[2]: wanted[SOME[2]]}
    file.write_bytes(file.read_bytes()[:100])
    assert measured(("full",)) == wanted
    assert measured(("full",)) == {SOME[2]: wanted[SOME[2]]}


def test_help_and_docstring_tell_the_length_of_a_passage():
    from tokenizers import Tokenizer

    from dejakv.cli.frontier import frontier_command

    recipe = resources.files("dejakv").joinpath("models/recipes/smollm2-135m/tokenizer.json")
    tokenizer = Tokenizer.from_str(recipe.read_text(encoding="utf-8"))
    cases = TextCases(4)
    few, many = (
        [
            len(made.make("edit", number, lambda text: tuple(tokenizer.encode(text).ids), 0).target)
            for number in range(40)
        ]
        for made in (cases, TextCases(5))
    )
    assert (sum(many) - sum(few)) / 40 == pytest.approx(140, abs=15)
    told = frontier_command.__annotations__["facts"].__metadata__[0].help
    assert "passages in a prompt, about 140 tokens each" in told
    assert "`passages` in a prompt, of about 140 tokens each" in (TextCases.__doc__ or "")


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 1 sample"):
        run_frontier("docs-lm", 0, tmp_path)
    with pytest.raises(ConfigError, match="out of range"):
        run_frontier("docs-lm", 1, tmp_path, shares=(2.0,))
    with pytest.raises(ConfigError, match="choose from"):
        run_frontier("docs-lm", 1, tmp_path, only=("best",))


def test_commands(tmp_path):
    import typer

    from dejakv.cli.explain import explain_command
    from dejakv.cli.frontier import frontier_command

    app = typer.Typer()
    app.command("frontier")(frontier_command)
    app.command("explain")(explain_command)
    runner = CliRunner()
    page, text = tmp_path / "page.html", tmp_path / "donor.txt"
    text.write_text("<s> Ann lives in Rome. <q> Where does Ann live? <a>")
    given = ["explain", "--donor", f"@{text}", "--target", "<s> Ann lives in Oslo. <q> Where does Ann live? <a>"]
    done = runner.invoke(app, [*given, "--html", str(page), "--max-new-tokens", "1"])
    assert done.exit_code == 0, done.output
    assert "oslo" in done.output
    assert page.read_text().startswith("<!doctype html>")
    missing = runner.invoke(app, ["explain", "--donor", "@/nowhere", "--target", "x"])
    assert "cannot read" in str(missing.exception)
    line = ["frontier", "--samples", "1", "--kind", "merge", "--only", SOME[0], "--facts", "5"]
    small = runner.invoke(app, [*line, "--output", str(tmp_path / "small")])
    assert small.exit_code == 0, small.output
    promised = [name for name in small.stdout.replace(",", " ").split() if name.endswith((".json", ".md", ".png"))]
    assert [Path(name).name for name in promised] == ["frontier.json", "frontier-table.md", "frontier.png"]
    assert all((tmp_path / "small" / Path(name).name).is_file() for name in promised)
    # No terminal here, as in a log: what is being done is told in lines.
    assert small.stderr.splitlines()[:2] == ["loading docs-lm", "docs-lm: 1 case to measure"]
    wrong = runner.invoke(app, ["frontier", "--kind", "better", "--output", str(tmp_path)])
    assert "--kind 'better' is unknown" in str(wrong.exception)


def test_the_bench_measures_full_prefill_as_the_engine_answers():
    from dejakv.engines.transformers.engine import TransformersEngine

    bench = Bench(TransformersEngine.from_pretrained("docs-lm"), steps=2)
    case = make_case("reorder", 0, 6, bench.encode)
    rows = bench.run(case, [cell for cell in cells() if cell.share == 1.0])["rows"]
    assert rows["full"]["right"]
    assert (rows["full"]["kl"], rows["full"]["top1"]) == (0.0, 1.0)
    everything = rows["context/value/share/1/1"]
    assert everything["share"] == 1.0
    assert everything["kl_mean"] < 1e-5
