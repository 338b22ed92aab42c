"""From the cases of a frontier run to its rows and table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejakv import __version__
from dejakv.experiments.summary import wilson
from research.frontier.bench import NOISE
from research.frontier.cells import Cell, moved_by


def rows_of(
    lines: Sequence[Mapping[str, Any]], cells: Mapping[str, Cell], kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """One row for each kind and cell. Divergences in nats, intervals 95% Wilson.

    share         asked for; `mean_share` of rows computed
    accuracy      share of right answers among those with a label, with its interval `lo`, `hi`; `of_full` relative to full
                  computation
    kl            mean KL divergence of the next token from full computation; `kl_mean` along full computation's answer
    top1          share of that answer with the same likeliest token; `same`: share of answers with all tokens the same
    ..._interval  of `same`, and, by bootstrap over the cases, of `kl`, `kl_mean` and `top1`
    stale_rate    share of stale answers among questions whose answer had to change, with its interval
    ttft_ratio    time of full prefill over time of lookup-free blending (map, rearranging and prefill), summed over cases
    """
    made: list[dict[str, Any]] = []
    for kind in kinds:
        group = [line["rows"] for line in lines if line["kind"] == kind]
        if not group:
            continue
        full = [rows["full"] for rows in group]
        plain = {"map": "", "budget": "share", "share": 1.0, "quality": ""}
        plain |= {"offsets": False, "surroundings": False}
        made.append({**_row(kind, full, full), **plain, "selector": "full"})
        noise = [rows for rows in group if NOISE in rows]
        if noise:
            row = _row(kind, [rows[NOISE] for rows in noise], [rows["full"] for rows in noise])
            made.append({**row, **plain, "selector": NOISE})
        for name, cell in cells.items():
            got = [rows for rows in group if name in rows]
            if got:
                row = _row(kind, [rows[name] for rows in got], [rows["full"] for rows in got])
                named = {
                    k: getattr(cell, k)
                    for k in ("map", "selector", "budget", "share", "quality", "offsets", "surroundings")
                }
                made.append({**row, **named})
    return made


def _row(kind: str, got: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    n = len(got)
    right, whole = _rate(got, "right"), _rate(full, "right")
    stale = _rate(got, "stale")
    same = sum(case["top1"] == 1.0 for case in got)
    timed = [(g["seconds"], f["seconds"]) for g, f in zip(got, full, strict=True) if g["seconds"] is not None]
    took = sum(seconds for seconds, _ in timed)
    return {
        "kind": kind,
        "n": n,
        "accuracy": right[0],
        "lo": right[1],
        "hi": right[2],
        "of_full": round(right[0] / whole[0], 4) if right[0] is not None and whole[0] else None,
        "kl": round(_mean(got, "kl"), 5),
        "kl_interval": _interval(got, "kl"),
        "kl_mean": round(_mean(got, "kl_mean"), 5),
        "kl_mean_interval": _interval(got, "kl_mean"),
        "top1": round(_mean(got, "top1"), 4),
        "top1_interval": _interval(got, "top1"),
        "same": round(same / n, 4),
        "same_interval": [round(end, 4) for end in wilson(same, n)],
        "stale_rate": stale[0],
        "stale_lo": stale[1],
        "stale_hi": stale[2],
        "mean_share": round(_mean(got, "share"), 4),
        "ttft_ratio": round(sum(seconds for _, seconds in timed) / took, 3) if took else None,
    }


def _mean(cases: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(case[name] for case in cases) / len(cases)


def _interval(cases: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """95% of the means of as many cases drawn with replacement."""
    values = np.array([case[name] for case in cases])
    drawn = np.random.default_rng(0).choice(values, (2000, len(values))).mean(1)
    return [round(float(end), 5) for end in np.percentile(drawn, (2.5, 97.5))]


def _rate(cases: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None, float | None]:
    """A rate over the cases with a label, and its interval; None without such cases."""
    marks = [case[name] for case in cases if case[name] is not None]
    if not marks:
        return None, None, None
    low, high = wilson(sum(marks), len(marks))
    return round(sum(marks) / len(marks), 4), round(low, 4), round(high, 4)


def write_report(
    folder: Path,
    settings: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    cells: Mapping[str, Cell],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Writes `frontier.json` and `frontier-table.md`; returns the first."""
    rows = rows_of(lines, cells, kinds)
    tokens = sum(line["tokens"] for line in lines) / max(1, len(lines))
    report = {**settings, "mean_tokens": round(tokens, 1), "dejakv_version": __version__, "rows": rows}
    (folder / "frontier.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "frontier-table.md").write_text(table(rows))
    return report


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, one table for each kind."""
    parts: list[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        parts += [
            f"## {kind}\n",
            "| map | selector | budget | share asked | computed, mean of layers | in the last layer | accuracy (95%) | of full"
            " | KL, first token | KL, answer (95%) | top-1 | same answer (95%) | stale | TTFT ratio | n |",
            "|" + "---|" * 15,
        ]
        for row in rows:
            if row["kind"] != kind:
                continue
            budget = row["budget"]
            budget += moved_by(row)
            budget = f"{row['quality']}: {budget}" if row["quality"] else budget
            (low, high), (from_, to) = row["same_interval"], row["kl_mean_interval"]
            parts.append(
                f"| {row['map']} | {row['selector']} | {budget} | {row['share']:.0%} | {row['mean_share']:.0%} | "
                f"{row['mean_share']:.0%} | {_accuracy(row)} | {_number(row['of_full'])} | {row['kl']:.4f} | "
                f"{row['kl_mean']:.4f} ({from_:.4f}-{to:.4f}) | {row['top1']:.3f} | {row['same']:.2f} ({low:.2f}-{high:.2f}) | "
                f"{_number(row['stale_rate'])} | {_number(row['ttft_ratio'])} | {row['n']} |"
            )
        parts.append("")
    return "\n".join(parts) + "\n"


def _accuracy(row: Mapping[str, Any]) -> str:
    return "" if row["accuracy"] is None else f"{row['accuracy']:.3f} ({row['lo']:.3f}-{row['hi']:.3f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def brief(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A small table for the terminal: full computation and its noise, the qualities, ours by need, the paper's pair."""
    from rich.table import Table

    shown = Table("change", "blended how", "computed", "accuracy", "KL", "top-1", "same", "stale")
    for row in rows:
        ours = row["budget"] != "share" and row["selector"] != "random"
        paper = (row["map"], row["selector"]) == ("embedding", "kv") and row["share"] in (0.1, 0.2)
        if row["selector"] in ("full", NOISE):
            how = "computed in full" if row["selector"] == "full" else "full, other dtype"
        elif row["quality"]:
            how = row["quality"]
        elif ours or paper:
            how = f"{row['map']}, {row['selector']}, {row['budget']} {row['share']:.0%}{moved_by(row)}"
        else:
            continue
        shown.add_row(
            row["kind"], how, f"{row['mean_share']:.0%}", _number(row["accuracy"]), f"{row['kl']:.4f}",
            f"{row['top1']:.3f}", f"{row['same']:.2f}", _number(row["stale_rate"]),
        )  # fmt: skip
    return shown
