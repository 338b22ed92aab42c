"""From the cases of a frontier run to its rows, table and plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.datasets.docs import KINDS
from dejakv.experiments.scoring import wilson


def rows_of(lines: Sequence[Mapping[str, Any]], cells: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a kind and cell.

    share         asked for; `mean_share` of rows computed over the layers, `last_share` in the last layer
    accuracy      answers that are right, with the 95% Wilson interval `lo`, `hi`; `of_full` relative to full computation
    kl            mean KL divergence of the next token from full computation, in nats
    stale_rate    of the questions whose answer had to change, those answered as before, with its interval
    ttft_ratio    time of full prefill over time of lookup-free blending (map, rearranging and prefill), summed over cases
    """
    made: list[dict[str, Any]] = []
    for kind in (k for k in KINDS if any(line["kind"] == k for line in lines)):
        group = [line["rows"] for line in lines if line["kind"] == kind]
        full = [rows["full"] for rows in group]
        whole = _row(kind, full, full)
        made.append({**whole, "map": "", "selector": "full", "budget": "share", "share": 1.0, "complete": None})
        for name, cell in cells.items():
            got = [rows[name] for rows in group if name in rows]
            if got:
                row = _row(kind, got, [rows["full"] for rows in group if name in rows])
                named = {k: getattr(cell, k) for k in ("map", "selector", "budget", "share", "complete")}
                made.append({**row, **named})
    return made


def _row(kind: str, got: Sequence[Sequence[Any]], full: Sequence[Sequence[Any]]) -> dict[str, Any]:
    n = len(got)
    right = sum(bool(case[0]) for case in got)
    whole = sum(bool(case[0]) for case in full) / len(full)
    stale = [case[2] for case in got if case[2] is not None]
    low, high = wilson(right, n)
    stale_low, stale_high = wilson(sum(stale), len(stale))
    timed = [(case[5], whole_case[5]) for case, whole_case in zip(got, full, strict=True) if case[5] is not None]
    took = sum(seconds for seconds, _ in timed)
    return {
        "kind": kind,
        "n": n,
        "accuracy": round(right / n, 4),
        "lo": round(low, 4),
        "hi": round(high, 4),
        "of_full": round(right / n / whole, 4) if whole else None,
        "kl": round(sum(case[1] for case in got) / n, 5),
        "stale_rate": round(sum(stale) / len(stale), 4) if stale else None,
        "stale_lo": round(stale_low, 4) if stale else None,
        "stale_hi": round(stale_high, 4) if stale else None,
        "mean_share": round(sum(case[3] for case in got) / n, 4),
        "last_share": round(sum(case[4] for case in got) / n, 4),
        "ttft_ratio": round(sum(seconds for _, seconds in timed) / took, 3) if took else None,
    }


def write_report(
    folder: Path, settings: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], cells: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes `frontier.json`, `frontier-table.md` and, where matplotlib is installed, `frontier.png`; returns the first."""
    rows = rows_of(lines, cells)
    tokens = sum(line["tokens"] for line in lines) / max(1, len(lines))
    report = {**settings, "mean_tokens": round(tokens, 1), "dejakv_version": __version__, "rows": rows}
    (folder / "frontier.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "frontier-table.md").write_text(table(rows))
    plot(rows, folder / "frontier.png")
    return report


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, one table a kind."""
    parts: list[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        parts += [
            f"## {kind}\n",
            "| map | selector | budget | share asked | computed, mean of layers | in the last layer | accuracy (95%) | of full | KL | stale | TTFT ratio | n |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["kind"] != kind:
                continue
            stale = _or_blank(row["stale_rate"], ".3f")
            budget = row["budget"] + ("" if row["complete"] in (1, None) else f", {row['complete']} complete")
            parts.append(
                f"| {row['map']} | {row['selector']} | {budget} | {row['share']:.0%} | {row['mean_share']:.0%} | "
                f"{row['last_share']:.0%} | {row['accuracy']:.3f} ({row['lo']:.3f}-{row['hi']:.3f}) | "
                f"{_or_blank(row['of_full'], '.3f')} | {row['kl']:.4f} | {stale} | {_or_blank(row['ttft_ratio'])} | {row['n']} |"
            )
        parts.append("")
    return "\n".join(parts) + "\n"


def _or_blank(value: float | None, form: str = "") -> str:
    return "" if value is None else format(value, form)


def brief(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A small table for the terminal: full computation, ours by need and at 10 and 20%, the paper's pair."""
    from rich.table import Table

    shown = Table("change", "map", "selector", "budget", "share", "computed", "accuracy (95%)", "KL", "stale")
    for row in rows:
        ours = row["budget"] != "share" and row["share"] in (0.0, 0.1, 0.2)
        paper = (row["map"], row["selector"]) == ("embedding", "kv") and row["share"] in (0.1, 0.2)
        if row["selector"] != "full" and not ours and not paper:
            continue
        stale = _or_blank(row["stale_rate"], ".3f")
        shown.add_row(
            row["kind"], row["map"], row["selector"], row["budget"], f"{row['share']:.0%}", f"{row['mean_share']:.0%}",
            f"{row['accuracy']:.3f} ({row['lo']:.3f}-{row['hi']:.3f})", f"{row['kl']:.4f}", stale,
        )  # fmt: skip
    return shown


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Accuracy over share, a panel a kind, a line a map and selector. False without matplotlib (extra `report`)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, panels = plt.subplots(2, 3, figsize=(15, 8), sharex=True, squeeze=False)
    for panel, kind in zip(panels.flat, kinds, strict=False):
        mine = [row for row in rows if row["kind"] == kind]
        full = next(row for row in mine if row["selector"] == "full")
        panel.axhline(full["accuracy"], color="black", linestyle=":", label="full prefill")
        pairs = dict.fromkeys((row["map"], row["selector"]) for row in mine if row["budget"] == "share" and row["map"])
        for map_name, selector in pairs:
            line = [
                row for row in mine if (row["map"], row["selector"], row["budget"]) == (map_name, selector, "share")
            ]
            line.sort(key=lambda row: row["share"])
            x = [100 * row["share"] for row in line]
            panel.plot(x, [row["accuracy"] for row in line], marker="o", markersize=3, label=f"{map_name} / {selector}")
            if (map_name, selector) == ("context", "value"):
                panel.fill_between(x, [row["lo"] for row in line], [row["hi"] for row in line], alpha=0.15)
        line = sorted((row for row in mine if row["budget"] == "within"), key=lambda row: row["share"])
        x = [100 * row["share"] for row in line]
        panel.plot(x, [row["accuracy"] for row in line], color="black", linewidth=2, label="context / whole sentences")
        for row in (row for row in mine if row["budget"] == "need" and row["share"] == 0.0):
            label = f"by need, {row['complete']} complete layer{'' if row['complete'] == 1 else 's'}"
            panel.plot(
                [100 * row["last_share"]], [row["accuracy"]], marker="*", markersize=14, linestyle="", label=label
            )
        panel.set_title(kind)
        panel.set_xlabel("% of rows computed behind the first layer")
        panel.set_ylabel("accuracy")
        panel.grid(alpha=0.3)
    panels.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


__all__ = ["brief", "plot", "rows_of", "table", "write_report"]
