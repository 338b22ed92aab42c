"""The report of `dejakv report`, with the sections of this folder's studies besides: frontiers, workloads and replays.

python -m research.report runs/frontier runs/replay --output paper.html
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.cli.report import Output, Sources, Svg, write_report
from dejakv.experiments.plain_words import share
from dejakv.experiments.report.charts import Chart, Series, bars, front, lines
from dejakv.experiments.report.make import FILES
from dejakv.experiments.report.page import Section, charts, command, facts, paragraph, table
from dejakv.experiments.table import Sheet
from research.command import run

Found = Mapping[str, Any]


def frontier_section(folder: Path, found: Found, prefix: str) -> Section:
    """Agreement over the share of rows that is computed, a chart and a Pareto front for each kind of change."""
    rows: Sequence[Found] = found["rows"]
    labelled = all(row["accuracy"] is not None for row in rows)
    value, says = ("accuracy", "accuracy") if labelled else ("top1", "same likeliest token along the answer")
    drawn: list[Chart] = []
    for place, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        points = {
            f"{number} {_way(row)}": (row["mean_share"], row[value])
            for number, row in enumerate(rows)
            if row["kind"] == kind and row["map"]
        }
        if points:
            drawn.append(
                front(
                    f"{prefix}-{place}", f"{kind}: {says}", "share of rows computed, mean of the layers", says, points
                )
            )
    quality = [row for row in rows if row.get("quality")]
    names = ("kind", "quality", "rows computed", "of full computation's time", says, "KL, mean")
    cells = [
        [
            row["kind"], row["quality"], share(row["mean_share"]), share(row["ttft_ratio"]), share(row[value]),
            "-" if row["kl_mean"] is None else f"{row['kl_mean']:.4f}",
        ]
        for row in quality
    ]  # fmt: skip
    words = [
        "python",
        "-m",
        "research.frontier",
        "--model",
        str(found.get("model")),
        "--samples",
        str(found.get("samples")),
        "--seed",
        str(found.get("seed")),
    ]
    return Section(
        f"Frontier {folder.name}: {found.get('model')}",
        [table(Sheet("", names, cells)), charts(drawn), command(shlex.join(words))],
    )


def _way(row: Found) -> str:
    return str(row.get("quality") or f"{row['map']}, {row['selector']}, {row['budget']}")


def workload_section(folder: Path, found: Found, prefix: str) -> Section:
    """Each stream: mean time to first token by arm beside prefix caching, tokens and changed answers."""
    drawn: list[Chart] = []
    rows: list[list[str]] = []
    for place, stream in enumerate(found["streams"]):
        name = f"{stream['workload']}, {stream['engine']}"
        arms: Mapping[str, Found] = stream["arms"]
        means = {arm: figures["ttft_ms"]["mean"] for arm, figures in arms.items()}
        base = means["prefix"]
        ends = {
            arm: [base * end for end in figures["ttft_against_prefix"]["ratio_interval"]]
            for arm, figures in arms.items()
            if figures["ttft_against_prefix"]
        }
        drawn.append(bars(f"{prefix}-{place}", f"{name}: mean time to first token", "milliseconds", means, ends))
        for arm, figures in arms.items():
            equal = figures["answers_equal"]
            against = figures["ttft_against_prefix"]
            rows.append(
                [
                    name, arm, str(stream["samples"]), f"{means[arm]:,.0f}", share(figures["computed_of_prefix"]),
                    "-" if against is None else f"{against['ratio']:.3f}",
                    "-" if equal is None else f"{equal} of {stream['samples']}",
                ]
            )  # fmt: skip
    columns = ("stream", "arm", "requests", "TTFT, ms", "tokens of prefix's", "TTFT of prefix's", "answers equal")
    return Section(
        f"Workloads {folder.name}",
        [charts(drawn), table(Sheet("", columns, rows)), command("python -m research.workloads")],
    )


def replay_section(folder: Path, found: Found, prefix: str) -> Section:
    """Hit rates of every policy at every budget, and over time."""
    rows: Sequence[Found] = found["rows"]
    drawn: list[Chart] = []
    endless = next(row for row in rows if row["policy"] == "infinite")
    for place, budget in enumerate(dict.fromkeys(row["budget"] for row in rows if row["budget"])):
        series = [
            Series(row["name"], _parts(row), row["over_time"])
            for row in (endless, *(row for row in rows if row["budget"] == budget))
        ]
        title = f"Hit rate over time, budget {budget}"
        drawn.append(lines(f"{prefix}-{place}", title, "share of the trace", "share of tokens not computed", series))
    cells = [
        [
            row["name"], row["budget"] or "none", f"{row['budget_tokens'] or 0:,}",
            share(row["hit_rate"]), share(row["of_belady"]), share(row["requests_hit"]), f"{row['evictions']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ("cache", "budget", "tokens", "hit rate", "of Belady's", "requests hit", "evictions")
    budgets = dict.fromkeys(row["budget"] for row in rows if row["budget"])
    words = [
        "python",
        "-m",
        "research.replay",
        str(found.get("trace")),
        *(word for budget in budgets for word in ("--budget", budget)),
    ]
    numbers = facts(
        {
            "requests": f"{found['requests']:,}",
            "tokens": f"{found['tokens']:,}",
            "different tokens": f"{found['distinct_tokens']:,}",
        }
    )
    return Section(
        f"Replay of {found.get('trace', folder.name)}",
        [
            numbers,
            table(Sheet("", columns, cells)),
            paragraph(*found["explained"]),
            charts(drawn),
            command(shlex.join(words)),
        ],
    )


def _parts(row: Found) -> list[float]:
    return [(place + 1) / len(row["over_time"]) for place in range(len(row["over_time"]))]


STUDIES = {
    **FILES,
    "frontier.json": ("rows", frontier_section),
    "workloads.json": ("streams", workload_section),
    "replay.json": ("rows", replay_section),
}


def report(sources: Sources, output: Output = Path("report.html"), svg: Svg = None) -> None:
    """Write one self-contained HTML page of runs, sweeps, estimates, frontiers, workloads and replays."""
    write_report(sources, output, svg, STUDIES)


if __name__ == "__main__":
    run(report)
