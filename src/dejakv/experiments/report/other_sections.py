"""The sections of a frontier, of workloads, of a replay and of a tuning."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.replay.table import ABOUT, NAMES, verdict
from dejakv.experiments.report.charts import Chart, Series, bars, front, lines
from dejakv.experiments.report.page import Section, charts, command, facts, interval, paragraph, share, table
from dejakv.experiments.tune.table import DONORS, in_plain_words

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
        "dejakv",
        "frontier",
        "--model",
        str(found.get("model")),
        "--samples",
        str(found.get("samples")),
        "--seed",
        str(found.get("seed")),
    ]
    return Section(
        f"Frontier {folder.name}: {found.get('model')}",
        [table(names, cells), charts(drawn), command(shlex.join(words))],
    )


def _way(row: Found) -> str:
    return str(row.get("quality") or f"{row['map']}, {row['selector']}, {row['budget']}")


def workload_section(folder: Path, found: Found, prefix: str) -> Section:
    """Each stream: mean time to first token by arm beside prefix caching, tokens and changed answers."""
    drawn: list[Chart] = []
    rows: list[list[object]] = []
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
                    name, arm, stream["samples"], f"{means[arm]:,.0f}", share(figures["computed_of_prefix"]),
                    "-" if against is None else f"{against['ratio']:.3f}",
                    "-" if equal is None else f"{equal} of {stream['samples']}",
                ]
            )  # fmt: skip
    columns = ("stream", "arm", "requests", "TTFT, ms", "tokens of prefix's", "TTFT of prefix's", "answers equal")
    return Section(
        f"Workloads {folder.name}", [charts(drawn), table(columns, rows), command("python -m benchmarks.workloads")]
    )


def replay_section(folder: Path, found: Found, prefix: str) -> Section:
    """Hit rates of every policy at every budget, and over time."""
    rows: Sequence[Found] = found["rows"]
    drawn: list[Chart] = []
    endless = next(row for row in rows if row["policy"] == "infinite")
    for place, budget in enumerate(dict.fromkeys(row["budget"] for row in rows if row["budget"])):
        series = [
            Series(NAMES.get(row["policy"], f"store, {row['policy']}"), _parts(row), row["over_time"])
            for row in (endless, *(row for row in rows if row["budget"] == budget))
        ]
        title = f"Hit rate over time, budget {budget}"
        drawn.append(lines(f"{prefix}-{place}", title, "share of the trace", "share of tokens not computed", series))
    cells = [
        [
            NAMES.get(row["policy"], f"store, {row['policy']}"), row["budget"] or "none", f"{row['budget_tokens'] or 0:,}",
            share(row["hit_rate"]), share(row["of_belady"]), share(row["requests_hit"]), f"{row['evictions']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ("cache", "budget", "tokens", "hit rate", "of Belady's", "requests hit", "evictions")
    budgets = dict.fromkeys(row["budget"] for row in rows if row["budget"])
    words = [
        "dejakv",
        "replay",
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
            table(columns, cells),
            paragraph(ABOUT, verdict(dict(found))),
            charts(drawn),
            command(shlex.join(words)),
        ],
    )


def _parts(row: Found) -> list[float]:
    return [(place + 1) / len(row["over_time"]) for place in range(len(row["over_time"]))]


def tune_section(folder: Path, found: Found, prefix: str) -> Section:
    """Hits against false hits by level and threshold, and the recommendation."""
    rows: Sequence[Found] = found["rows"]
    series: list[list[Series]] = [[], []]
    for guard, label in ((True, "words checked"), (False, "words not checked")):
        chosen = [row for row in rows if row["level"] == "semantic_text" and row["lexical_guard"] is guard]
        for place, (rate, ends) in enumerate((("hit_rate", "hit_interval"), ("false_hit_rate", "false_hit_interval"))):
            known = [row for row in chosen if row[rate] is not None]
            if known:
                low, high = ([row[ends][end] for row in known] for end in (0, 1))
                x = [row["threshold"] for row in known]
                series[place].append(Series(label, x, [row[rate] for row in known], low, high))
    titles = (("hits", "Hit rate of similar texts"), ("false", "Of the judged hits, false ones"))
    drawn = [
        lines(f"{prefix}-{name}", f"{title}, with 95% intervals", "least cosine", "share", part, marker="o")
        for (name, title), part in zip(titles, series, strict=True)
        if part
    ]
    cells = [
        [
            DONORS[row["level"]], "-" if row["threshold"] is None else f"{row['threshold']:g}",
            "checked" if row["lexical_guard"] else "-", share(row["hit_rate"]), interval(row["hit_interval"]),
            share(row["false_hit_rate"]), interval(row["false_hit_interval"]), share(row["tokens_saved"] / found["prompt_tokens"]),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ("donors", "least cosine", "words", "hit rate", "95%", "false of judged", "95%", "tokens saved")
    return Section(
        f"Settings for {found['log']}", [paragraph(*in_plain_words(dict(found))), charts(drawn), table(columns, cells)]
    )
