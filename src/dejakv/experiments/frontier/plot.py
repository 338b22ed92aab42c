"""The frontier as a picture: a panel for each kind of change, a line for each way of blending."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.frontier.cells import moved_by

NAMES = {
    "accuracy": "accuracy",
    "kl_mean": "KL along the answer, nats",
    "top1": "same likeliest token along the answer",
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Writes `figure_of` the rows. False without matplotlib (extra `report`)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = figure_of(rows)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def figure_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A figure of KL over share where there is a noise floor to compare with, else of accuracy if answers have labels, else of
    agreement along the answer."""
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    across = min(3, len(kinds))
    down = -(-len(kinds) // across)
    figure, panels = plt.subplots(down, across, figsize=(5 * across, 4 * down), sharex=True, squeeze=False)
    labelled = all(row["accuracy"] is not None for row in rows if row["selector"] == "full")
    measured = any(row["selector"] == "noise" for row in rows)
    value = "kl_mean" if measured else "accuracy" if labelled else "top1"
    colors = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(_way(row) for row in rows if row["map"]))}
    for panel, kind in zip(panels.flat, kinds, strict=False):
        _panel(panel, [row for row in rows if row["kind"] == kind], value, colors)
        panel.set_title(kind)
        panel.set_xlabel("% of rows computed in the last layer")
        panel.set_ylabel(NAMES[value])
        panel.grid(alpha=0.3)
        if measured:
            panel.set_yscale("symlog", linthresh=1e-3)
            panel.set_ylim(bottom=0)
    for panel in panels.flat[len(kinds) :]:
        panel.remove()
    handles = {
        label: line
        for panel in panels.flat[: len(kinds)]
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=7)
    figure.set_layout_engine("constrained")
    return figure


def _panel(panel: Any, rows: Sequence[Mapping[str, Any]], value: str, colors: Mapping[str, str]) -> None:
    """The lines of one kind of change: dots for fixed shares, stars for what is computed by need."""
    for row in rows:
        if row["selector"] in ("full", "noise"):
            label, style = ("full prefill", ":") if row["selector"] == "full" else ("noise floor", "--")
            panel.axhline(row[value], color="black", linestyle=style, label=label)
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["map"]:
            ways.setdefault(_way(row), []).append(row)
    for name, line in ways.items():
        line.sort(key=lambda row: row["last_share"])
        need = line[0]["budget"] in ("need", "first")
        panel.plot(
            [100 * row["last_share"] for row in line], [row[value] for row in line], label=name, color=colors[name],
            marker="*" if need else "o", markersize=9 if need else 3, linewidth=2 if line[0]["budget"] == "within" else 1,
        )  # fmt: skip


def _way(row: Mapping[str, Any]) -> str:
    """What the rows of one line have in common."""
    if row["budget"] == "share":
        return f"{row['map']} / {row['selector']}"
    if row["budget"] == "within":
        return f"{row['map']} / whole sentences"
    if row["budget"] == "first":
        return "by need, then the first rows of each run"
    # Without a share, what ranks rows is of no account.
    ranked = row["selector"] if row["share"] else "nothing else"
    return f"by need, {ranked}{moved_by(row)}, {row['complete']} complete"
