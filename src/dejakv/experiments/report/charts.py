"""Charts by matplotlib as SVG, as wide as a phone."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.errors import MissingExtraError

INK, LINE = "#24292f", "#d0d4d9"
COLORS = ("#8a8f98", "#1f5fa8", "#c2571a", "#2e7d4f", "#8250a8", "#a8891f", "#1a8fa0", "#b03a5b")

_LINE = 56
"""Characters of a legend that fit below the axes."""


@dataclass(frozen=True)
class Chart:
    """A figure: its SVG is in the page."""

    title: str
    svg: str


@dataclass(frozen=True)
class Series:
    """One line; `low` and `high` are the ends of its 95% intervals, if known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines(title: str, x: str, y: str, series: Sequence[Series]) -> Chart:
    """Lines with a legend below, and intervals where given. `x`, `y`: labels of the axes.

    Raises: MissingExtraError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "dejakv report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10, "font.family": "sans-serif", "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": LINE, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6, "xtick.color": INK,
        "ytick.color": INK,
    }  # fmt: skip
    labels = [textwrap.fill(one.label, _LINE) for one in series]
    height = 3.2 + 0.2 * sum(1 + label.count("\n") for label in labels)
    buffer = io.StringIO()
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(4.6, height), layout="constrained")
        axes.set(xlabel=x, ylabel=y)
        for number, (one, label) in enumerate(zip(series, labels, strict=True)):
            color = COLORS[number % len(COLORS)]
            axes.plot(one.x, one.y, label=label, color=color, marker="o", markersize=4, linewidth=1.6)
            if one.low is not None and one.high is not None:
                axes.vlines(one.x, one.low, one.high, color=color, linewidth=1)
        if len(series) > 1:
            columns = 2 if max(map(len, labels)) <= _LINE // 2 - 4 else 1
            figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return Chart(title, buffer.getvalue())
