"""From the cases of a frontier run to its rows and table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dejakv import __version__
from dejakv.blend.settings import DEFAULT
from dejakv.experiments.summary import wilson
from research.frontier.bench import FULL, NOISE
from research.frontier.cells import Cell

Cases = Sequence[Mapping[str, Any]]


def rows_of(lines: Cases, cells: Sequence[Cell], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each kind and cell, with the cell's fields.

    Divergences in nats, intervals 95%: Wilson, or bootstrap over the cases.

    accuracy    share of right answers among those with a label, `of_full` relative to full
                computation
    kl          mean KL divergence of the next token from full computation; `kl_mean` along full
                computation's answer
    top1        share of that answer with the same likeliest token; `same`: share of answers with
                all tokens the same
    changed     share of answers with another first token
    stale_rate  share of stale answers among questions whose answer had to change
    mean_share  share of rows computed
    ttft_ratio  time of full prefill over time of lookup-free blending (map, rearranging and
                prefill), summed over cases
    time_by_full  time of such blending over that of full prefill: median of the cases, and its
                  quartiles
    kl_more, top1_more  mean of what a case's `kl_mean` and `top1` exceed those of the default
                        quality by; None where it was not measured
    """
    whole = {name: Cell("", name, 1.0) for name in (FULL, NOISE)}
    made: list[dict[str, Any]] = []
    for kind in kinds:
        group = [line["rows"] for line in lines if line["kind"] == kind]
        for name, cell in {**whole, **{cell.name: cell for cell in cells}}.items():
            if there := [rows for rows in group if name in rows]:
                got, default = ([rows.get(way) for rows in there] for way in (name, DEFAULT))
                made.append(
                    {
                        "kind": kind,
                        "way": name,
                        **asdict(cell),
                        **_row(got, [rows[FULL] for rows in there], default),
                    }
                )
    return made


def _row(got: Cases, full: Cases, default: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    n = len(got)
    pairs = [(case, other) for case, other in zip(got, default, strict=True) if other is not None]
    times = [case["seconds"] / other["seconds"] for case, other in zip(got, full, strict=True)]
    right, whole = _rate(got, "right"), _rate(full, "right")
    return {
        "n": n,
        "accuracy": right,
        "of_full": round(right[0] / whole[0], 4) if right and whole and whole[0] else None,
        "kl": mean_of(got, "kl"),
        "kl_mean": mean_of(got, "kl_mean"),
        "top1": mean_of(got, "top1"),
        "same": _share([case["top1"] == 1.0 for case in got]),
        "changed": _rate(got, "changed"),
        "stale_rate": _rate(got, "stale"),
        "mean_share": round(sum(case["share"] for case in got) / n, 4),
        "ttft_ratio": round(
            sum(case["seconds"] for case in full) / sum(case["seconds"] for case in got), 3
        ),
        "time_by_full": [round(float(value), 3) for value in np.percentile(times, (50, 25, 75))],
        **{
            f"{short}_more": (
                mean_of([{name: case[name] - other[name]} for case, other in pairs], name)
                if pairs
                else None
            )
            for short, name in (("kl", "kl_mean"), ("top1", "top1"))
        },
    }


def mean_of(cases: Cases, name: str) -> list[float]:
    """A mean, and the ends of 95% of the means of as many cases drawn with replacement."""
    values = np.array([case[name] for case in cases])
    drawn = np.random.default_rng(0).choice(values, (2000, len(values))).mean(1)
    return [round(float(value), 5) for value in (values.mean(), *np.percentile(drawn, (2.5, 97.5)))]


def _rate(cases: Cases, name: str) -> list[float] | None:
    """The rate over the cases with a label; None without such cases."""
    marks = [case[name] for case in cases if case.get(name) is not None]
    return _share(marks) if marks else None


def _share(marks: Sequence[bool]) -> list[float]:
    return [round(value, 4) for value in (sum(marks) / len(marks), *wilson(sum(marks), len(marks)))]


def write_report(
    folder: Path,
    settings: Mapping[str, Any],
    lines: Cases,
    cells: Sequence[Cell],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Writes `frontier.json` and `frontier-table.md`; returns the first."""
    rows = rows_of(lines, cells, kinds)
    tokens = sum(line["tokens"] for line in lines) / max(1, len(lines))
    report = {
        **settings,
        "mean_tokens": round(tokens, 1),
        "dejakv_version": __version__,
        "rows": rows,
    }
    (folder / "frontier.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "frontier-table.md").write_text(table(rows))
    return report


_COLUMNS = ("accuracy", "kl", "kl_mean", "top1", "same", "stale_rate")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, one table for each kind. A figure stands with its 95% interval."""
    parts: list[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        parts += [
            f"## {kind}\n",
            "| blended how | computed | " + " | ".join(_COLUMNS) + " | TTFT ratio | n |",
        ]
        parts.append("|---" * (len(_COLUMNS) + 4) + "|")
        for row in rows:
            if row["kind"] == kind:
                cells = " | ".join(_cell(row[name]) for name in _COLUMNS)
                parts.append(
                    f"| {_how(row)} | {row['mean_share']:.0%} | {cells} | {row['ttft_ratio']:.2f} |"
                    f" {row['n']} |"
                )
        parts.append("")
    return "\n".join(parts) + "\n"


def _how(row: Mapping[str, Any]) -> str:
    if not row["map"]:
        return "computed in full" + (", in the other dtype" if row["selector"] == NOISE else "")
    words = [f"{row['map']}, {row['selector']}, {row['budget']} {row['share']:.0%}"]
    words += [name for name in ("offsets", "surroundings") if row[name]]
    return f"{row['quality']}: {', '.join(words)}" if row["quality"] else ", ".join(words)


def _cell(value: Sequence[float] | None) -> str:
    return "" if value is None else f"{value[0]:.4f} ({value[1]:.4f} to {value[2]:.4f})"
