"""Charts by matplotlib as SVG."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.errors import MissingExtraError

INK, LINE = "#24292f", "#d0d4d9"
COLORS = ("#8a8f98", "#1f5fa8", "#c2571a", "#2e7d4f", "#8250a8", "#a8891f", "#1a8fa0", "#b03a5b")

_LINE = 56
"""Characters of a legend that fit below the axes."""


@dataclass(frozen=True)
class Chart:
    """A figure: its SVG is in the page, and may be a file of its own (`name`.svg)."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True)
class Series:
    """One line or set of points; `low` and `high` are the ends of its 95% intervals, if known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Figure:
    """A matplotlib figure in the page's style, as wide as a phone. Raises: MissingExtraError without matplotlib."""

    def __init__(self, name: str, title: str, x: str = "", y: str = "", height: float = 3.3) -> None:
        try:
            import matplotlib
        except ImportError as error:
            raise MissingExtraError("matplotlib", "report", "dejakv report") from error
        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.name, self.title = name, title
        self._style: Any = {
            "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
            "axes.edgecolor": LINE, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
            "axes.spines.right": False, "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.6, "axes.axisbelow": True,
            "font.family": "sans-serif",
        }  # fmt: skip
        self._pyplot = pyplot
        with pyplot.rc_context(self._style):
            self.figure, self.axes = pyplot.subplots(figsize=(4.6, height), layout="constrained")
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def legend(self) -> None:
        """A legend below the axes, each label whole."""
        handles, labels = self.axes.get_legend_handles_labels()
        labels = [textwrap.fill(label, _LINE) for label in labels]
        columns = 2 if max(map(len, labels)) <= _LINE // 2 - 4 else 1
        self.figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK, fontsize=9
        )

    def drawn(self) -> Chart:
        """The chart. The figure is closed."""
        buffer = io.StringIO()
        with self._pyplot.rc_context(self._style):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        self._pyplot.close(self.figure)
        return Chart(self.name, self.title, buffer.getvalue())


def bars(
    name: str, title: str, x: str, values: Mapping[str, float], intervals: Mapping[str, Any] | None = None
) -> Chart:
    """Horizontal bars with their values, and intervals `(low, high)` where given."""
    figure = Figure(name, title, x, height=0.9 + 0.38 * max(1, len(values)))
    labels = list(values)[::-1]
    heights = [values[label] for label in labels]
    figure.axes.barh(labels, heights, color=COLORS[1], height=0.62)
    for place, label in enumerate(labels):
        interval = (intervals or {}).get(label)
        if interval is not None:
            figure.axes.plot(interval, [place, place], color=INK, linewidth=1)
        top = max(values[label], interval[1]) if interval is not None else values[label]
        figure.axes.annotate(
            f" {values[label]:,.3g}" if values[label] < 1000 else f" {values[label]:,.0f}",
            (top, place),
            va="center",
            fontsize=9,
            color=INK,
        )
    figure.axes.margins(x=0.18)
    figure.axes.set_xlim(left=0)
    figure.axes.grid(axis="y", visible=False)
    return figure.drawn()


def lines(
    name: str, title: str, x: str, y: str, series: Sequence[Series], *, marker: str = "", log_x: bool = False
) -> Chart:
    """Lines with a legend below, and intervals where given."""
    figure = Figure(name, title, x, y, height=3.2 + 0.2 * sum(1 + len(one.label) // _LINE for one in series))
    for number, one in enumerate(series):
        color = COLORS[number % len(COLORS)]
        figure.axes.plot(one.x, one.y, label=one.label, color=color, marker=marker, markersize=4, linewidth=1.6)
        if one.low is not None and one.high is not None:
            figure.axes.vlines(one.x, one.low, one.high, color=color, linewidth=1)
    if log_x:
        figure.axes.set_xscale("log")
    if len(series) > 1:
        figure.legend()
    return figure.drawn()


def front(name: str, title: str, x: str, y: str, points: Mapping[str, tuple[float, float]]) -> Chart:
    """Points, less of `x` and more of `y` being better, and the Pareto front through those that no other beats."""
    figure = Figure(name, title, x, y, height=3.6)
    best = pareto(points)
    rest = [point for label, point in points.items() if label not in best]
    figure.axes.scatter([p[0] for p in rest], [p[1] for p in rest], color=COLORS[0], s=18, label="beaten by another")
    chosen = sorted(points[label] for label in best)
    figure.axes.plot(
        [p[0] for p in chosen],
        [p[1] for p in chosen],
        color=COLORS[2],
        marker="o",
        markersize=5,
        linewidth=1.2,
        label="Pareto front",
    )
    for number, label in enumerate(sorted(best, key=lambda label: points[label])[:8], 1):
        figure.axes.annotate(f" {number}", points[label], color=INK, fontsize=9)
    figure.legend()
    return figure.drawn()


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The points that no other beats: none has as little of the first and as much of the second, and more of either."""
    return [
        label
        for label, (x, y) in points.items()
        if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points.values())
    ]
