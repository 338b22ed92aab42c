"""A run on one screen, and as the first part of its page."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.experiments.test_experiments_summary import ROWS, row, summary_of, timed
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.cli.progress import watching
from dejakv.experiments.reports.report import curves
from dejakv.experiments.summary import ArmOutcome, SampleRow
from dejakv.experiments.table import headline, show_result, times, verdict
from dejakv.records import Record


def test_a_run_on_one_screen(tmp_path: Path) -> None:
    line = "run --preset docs --dtype fp32 --max-samples 6 --arms prefix,cache --rounding 4 --brief --output".split()
    done = CliRunner().invoke(typer_app, [*line, str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    printed = done.stdout.strip().splitlines()
    assert len(printed) <= 15
    assert re.match(
        r"6 prompts of docs, \d+ to \d+ tokens each, answers of up to \d+, through docs-lm in fp32\.", printed[0]
    )
    assert "prefix caching" in printed[2]
    rounding = re.search(r"Rounding alone .*: the first token in (\d) of 4, the whole answer in (\d)\.", done.stdout)
    assert rounding is not None, done.stdout
    assert int(rounding[1]) >= int(rounding[2])
    assert "the same in bf16" in done.stderr
    assert "computed tokens" not in done.stdout, "the tables are in the page"
    assert printed[-1].endswith("/run/report.html")
    page = (tmp_path / "run" / "report.html").read_text()
    for part in ("Time to the first token", "<svg", "Where the time of a request went", "Measured until 20"):
        assert part in page


@pytest.mark.parametrize("more", [["--dtype", "bf16"], ["--dtype", "fp32", "--engine", "vllm"]], ids=" ".join)
def test_rounding_is_measured_beside_fp32(more: list[str]) -> None:
    done = CliRunner().invoke(typer_app, ["run", "--preset", "docs", "--rounding", "4", *more])
    assert "give --dtype fp32" in str(done.exception)


def test_figures_stand_beside_prefix_caching_or_no_reuse() -> None:
    arms = {"prefix": "prefix caching", "none": "no reuse"}
    for base, name in arms.items():
        rows = [row(1, "red", "red"), row(2, "red", "red")]
        for each in rows:
            object.__setattr__(each, "arms", {arm: each.arms[arm] for arm in (base, "cache")})
        sheet = headline(summary_of(rows))
        assert sheet.columns == ("", name, "DejaKV", f"of {name}'s")
        tokens = next(cells for cells in sheet.rows if cells[0] == "tokens computed")
        computed = [sum(each.arms[arm].record.computed_tokens for each in rows) for arm in (base, "cache")]
        assert tokens[1:] == (*(f"{count:,}" for count in computed), f"{computed[1] / computed[0]:.1%}")
    alone = headline(summary_of([row(1, "red", "red")][:0]))
    assert len(alone.columns) == 2


@pytest.mark.parametrize(
    ("cache", "says"), [(1.0, "Reuse pays for prompts like these"), (2.0, "did not show a gain here")]
)
def test_the_advice_follows_from_the_times(cache: float, says: str) -> None:
    rows = [timed(number, 2.0 + number / 100, 2.0 + number / 101, cache + number / 100) for number in range(12)]
    assert says in verdict(summary_of(rows))[-1]


def test_approximate_answers_are_said_to_be() -> None:
    first = next(line for line in verdict(summary_of(ROWS)) if line.startswith("Answers"))
    assert "the first token in 5 of 5, the whole answer in 4" in first
    assert "approximate" in first
    exact = [row(3, "red", "red", level="exact_text", method="exact")]
    assert "approximate" not in "".join(verdict(summary_of(exact)))


def test_parts_of_the_time_sum_to_that_of_a_request() -> None:
    records = [
        Record("a", ttft_ms=5.0, latency_ms=8.0, lookup_ms=1.0, inject_ms=0.5),
        Record("b", ttft_ms=3.0, latency_ms=4.0),
    ]
    rows = [SampleRow(record.request_id, "?", None, {"cache": ArmOutcome(record, "a")}) for record in records]
    cells = {name: float(value) for name, value in times(rows).rows}
    assert cells == {
        "lookup": 0.5,
        "state moved in": 0.2,
        "computed, until the first token": 3.2,
        "further tokens": 2.0,
    }


def test_curves_are_within_the_picture_and_said_in_words() -> None:
    drawn = curves("Time & <b>", "seconds", {"prefix": [1.0, 3.0], "cache": [0.5, 0.0]}, {"prefix": "p", "cache": "c"})
    assert "Time &amp; &lt;b&gt;" in drawn
    assert 'aria-label="Time &amp; &lt;b&gt;, seconds, over 2 requests; at the last: p 3, c 0"' in drawn
    for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn):
        assert 0 <= float(x) <= 640
        assert 0 <= float(y) <= 220
    assert curves("one", "s", {"cache": [1.0]}, {"cache": "c"}) == ""
    assert "<path" in curves("zero", "s", {"cache": [0.0, 0.0]}, {"cache": "c"})


def test_a_terminal_has_a_bar_with_the_means() -> None:
    out = io.StringIO()
    with watching(Console(file=out, width=160, force_terminal=True)) as watch:
        watch.stage("[not markup]")
        watch.sample(1, 4, timed(1, 100.0, 80.0, 40.0))
    assert "[not markup]" in out.getvalue()
    assert "1/4" in out.getvalue()
    assert "mean TTFT ms: none 100, prefix 80, cache 40" in out.getvalue()


def test_a_result_without_the_cache_arm_is_shown() -> None:
    rows = [timed(number, 2.0, 2.0, 1.0) for number in range(2)]
    for each in rows:
        object.__setattr__(each, "arms", {"none": each.arms["none"]})
    console = Console(file=io.StringIO(), width=100, record=True)
    summary: dict[str, Any] = summary_of(rows)
    show_result(summary, rows, console)
    assert "no reuse" in console.export_text()
