"""The frontier as a picture: a panel for each kind of change, a line for each map and selector."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Accuracy over share if answers have labels, otherwise agreement along the answer. False without matplotlib (extra
    `report`)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    across = min(3, len(kinds))
    down = -(-len(kinds) // across)
    figure, panels = plt.subplots(down, across, figsize=(5 * across, 4 * down), sharex=True, squeeze=False)
    labelled = all(row["accuracy"] is not None for row in rows if row["selector"] == "full")
    value = "accuracy" if labelled else "top1"
    for panel, kind in zip(panels.flat, kinds, strict=False):
        _panel(panel, [row for row in rows if row["kind"] == kind], value)
        panel.set_title(kind)
        panel.set_xlabel("% of rows computed in the last layer")
        panel.set_ylabel("accuracy" if labelled else "same likeliest token along the answer")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(kinds) :]:
        panel.remove()
    handles = {
        label: line
        for panel in panels.flat[: len(kinds)]
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=7)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _panel(panel: Any, rows: Sequence[Mapping[str, Any]], value: str) -> None:
    """The lines of one kind of change: a line for fixed shares, a star for shares by need."""
    for row in rows:
        if row["selector"] in ("full", "noise"):
            label, style = ("full prefill", ":") if row["selector"] == "full" else ("noise floor", "--")
            panel.axhline(row[value], color="black", linestyle=style, label=label)
    for budget, width in (("share", 1), ("within", 2)):
        chosen = [row for row in rows if row["budget"] == budget and row["map"]]
        for map_name, selector in dict.fromkeys((row["map"], row["selector"]) for row in chosen):
            line = [row for row in chosen if (row["map"], row["selector"]) == (map_name, selector)]
            line.sort(key=lambda row: row["share"])
            x = [100 * row["last_share"] for row in line]
            name = f"{map_name} / {selector if budget == 'share' else 'whole sentences'}"
            panel.plot(x, [row[value] for row in line], marker="o", markersize=3, linewidth=width, label=name)
    for row in (row for row in rows if row["budget"] == "need"):
        label = row["quality"] or f"by need, {row['selector']} {row['share']:.0%}, {row['complete']} complete"
        panel.plot([100 * row["last_share"]], [row[value]], marker="*", markersize=12, linestyle="", label=label)
