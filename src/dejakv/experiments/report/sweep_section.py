"""The section of a sweep: a row an experiment, agreement and hits against the threshold, and the Pareto front."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.report.charts import Chart, Series, front, lines, pareto
from dejakv.experiments.report.page import Block, Section, charts, paragraph, table, text
from dejakv.experiments.settings import run_command_of
from dejakv.experiments.summary import wilson
from dejakv.experiments.sweep_log import figures, number, part
from dejakv.experiments.table import Sheet

Rows = Sequence[Mapping[str, Any]]


def sweep_section(path: Path, found: Rows, prefix: str) -> Section:
    """`found`: the rows of `sweep_log.logged`."""
    done = [row for row in found if not row["error"]]
    failed = [f"{row['name']} failed: {row['error']}" for row in found if row["error"]]
    cells = [figures(row) for row in found]
    sheet = Sheet("", list(cells[0]), [list(row.values()) for row in cells]) if cells else Sheet("", (), ())
    return Section(
        f"Sweep {path.name}",
        [
            paragraph(f"{len(done)} experiments, {len(failed)} failed"),
            table(sheet),
            charts([*_thresholds(done, prefix), *_fronts(done, prefix)]),
            paragraph(*failed),
            _commands(found),
        ],
    )


def _thresholds(done: Rows, prefix: str) -> list[Chart]:
    """Hit rate and agreement against each threshold that varies, a line for what else differs."""
    found: list[Chart] = []
    for name in ("similarity_threshold", "prompt", "vision"):
        groups: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
        for row in done:
            threshold, rest = _threshold(row, name)
            if threshold is not None:
                groups.setdefault(rest, []).append((threshold, row))
        groups = {rest: group for rest, group in groups.items() if len({threshold for threshold, _ in group}) > 1}
        if not groups:
            continue
        title = name.replace("_", " ") if name == "similarity_threshold" else f"threshold of the layer {name}"
        for figure, about in (("agreement", "answers equal to full computation's"), ("hit_rate", "hit rate")):
            series = [
                line
                for label, group in zip(_labels(groups), groups.values(), strict=True)
                if (line := _series(group, figure, label))
            ]
            if series:
                said = f"{about.capitalize()} against the {title}"
                found.append(lines(f"{prefix}-{figure}-{name}", said, title, about, series[:8], marker="o"))
    return found


def _labels(groups: Iterable[str]) -> list[str]:
    """For each group the settings in which it differs from the others, with their values. `groups`: settings as JSON."""
    every: list[dict[str, Any]] = [json.loads(settings) for settings in groups]
    names = sorted({name for settings in every for name in settings})
    differ = [name for name in names if len({json.dumps(settings.get(name)) for settings in every}) > 1]
    return [", ".join(_said(name, settings.get(name)) for name in differ) for settings in every]


def _said(name: str, value: Any) -> str:
    if name == "cache.embedding_layers":
        return " ".join(f"{layer} {threshold}" for layer, threshold in value or ())
    plain = name.removeprefix("cache.").replace("_", " ")
    return plain if value is True else f"no {plain}" if value is False else f"{plain} {value}"


def _series(group: Sequence[tuple[float, Mapping[str, Any]]], figure: str, label: str) -> Series | None:
    points: list[tuple[float, float, float, float]] = []
    for threshold, row in sorted(group, key=lambda item: item[0]):
        rate, samples = number(row[figure]), number(row["samples"])
        if rate is not None and samples:
            low, high = wilson(round(rate * samples), round(samples))
            points.append((threshold, rate, low, high))
    if not points:
        return None
    x, y, low, high = (list(values) for values in zip(*points, strict=True))
    return Series(label, x, y, low, high)


def _threshold(row: Mapping[str, Any], name: str) -> tuple[float | None, str]:
    """The threshold of a row, and its other settings as text; None where that level is off."""
    settings = json.loads(row["settings"] or "{}")
    settings.pop("output", None)
    if name == "similarity_threshold":
        value = settings.pop("cache.similarity_threshold", None)
        return (value if settings.get("cache.semantic_text") else None), json.dumps(settings, sort_keys=True)
    layers = dict(_layer(text) for text in settings.get("cache.embedding_layers") or ())
    value = layers.pop(name, None)
    return value, json.dumps(
        {**settings, "cache.embedding_layers": sorted(layers.items())}, sort_keys=True, default=str
    )


def _layer(text: str) -> tuple[str, float | None]:
    name, _, rest = text.partition(":")
    threshold = rest.partition(":")[2]
    return name, float(threshold) if threshold else None


def _fronts(done: Rows, prefix: str) -> list[Chart]:
    """Speed against agreement: time to first token, and tokens computed."""
    found: list[Chart] = []
    for key, label, of, whole in (
        ("ttft", "median TTFT over prefix caching's", "ttft_p50_cache", "ttft_p50_prefix"),
        ("tokens", "tokens computed, share of the prompts'", "computed_cache", "computed_none"),
    ):
        points = {
            str(row["name"]): (ratio, agreement)
            for row in done
            if (ratio := part(row, of, whole)) is not None and (agreement := number(row["agreement"])) is not None
        }
        if len(points) > 1:
            best = sorted(pareto(points), key=lambda name: points[name])[:8]
            names = ", ".join(f"{place} {name}" for place, name in enumerate(best, 1))
            title = f"Speed against agreement ({names})"
            found.append(front(f"{prefix}-front-{key}", title, label, "answers equal to full computation's", points))
    return found


def _commands(found: Rows) -> Block:
    each = "".join(
        f"<p>{text(row['name'])}</p><pre>{text(run_command_of(json.loads(row['settings'] or '{}')))}</pre>"
        for row in found
    )
    return Block(f"<details><summary>The command of each experiment</summary>{each}</details>")
