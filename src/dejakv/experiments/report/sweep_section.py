"""The section of a sweep: a row an experiment, and agreement and hits against the threshold."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.report.charts import Chart, Series, lines
from dejakv.experiments.report.page import Block, Section, charts, paragraph, table, text
from dejakv.experiments.settings import run_command_of
from dejakv.experiments.summary import wilson
from dejakv.experiments.sweep_log import failures, number, sheet

Rows = Sequence[Mapping[str, Any]]


def sweep_section(path: Path, found: Rows) -> Section:
    """`found`: the rows of `sweep_log.logged`."""
    done = [row for row in found if not row["error"]]
    failed = failures(found)
    return Section(
        f"Sweep {path.name}",
        [
            paragraph(f"{len(done)} experiments, {len(failed)} failed"),
            table(sheet(found)),
            charts(_thresholds(done)),
            paragraph(*failed),
            _commands(found),
        ],
    )


def _thresholds(done: Rows) -> list[Chart]:
    """Hit rate and agreement against each threshold that varies, a line for what else differs."""
    found: list[Chart] = []
    every = [(_settings(row), row) for row in done]
    for name in ("similarity threshold", "prompt", "vision"):
        groups: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
        for settings, row in every:
            if (value := settings.get(name)) is not None:
                rest = {key: other for key, other in settings.items() if key != name}
                groups.setdefault(json.dumps(rest, sort_keys=True), []).append((float(value), row))
        groups = {rest: group for rest, group in groups.items() if len({value for value, _ in group}) > 1}
        title = f"threshold of the layer {name}" if name in ("prompt", "vision") else name
        for figure, about in (("agreement", "answers equal to full computation's"), ("hit_rate", "hit rate")):
            made = [
                _series(group, figure, label) for label, group in zip(_labels(groups), groups.values(), strict=True)
            ]
            if series := [one for one in made if one.x]:
                said = f"{about.capitalize()} against the {title}"
                found.append(lines(said, title, about, series[:8]))
    return found


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Name a row's settings in words, and each layer's threshold by its layer."""
    told: dict[str, Any] = json.loads(row["settings"] or "{}")
    layers = [layer.split(":") for layer in told.pop("cache.embedding_layers", None) or ()]
    if not told.get("cache.semantic_text"):
        told.pop("cache.similarity_threshold", None)
    plain = {name.removeprefix("cache.").replace("_", " "): value for name, value in told.items() if name != "output"}
    return plain | {layer[0]: layer[2] for layer in layers if len(layer) > 2}


def _labels(groups: Iterable[str]) -> list[str]:
    """For each group the settings in which it differs from the others, with their values. `groups`: settings as JSON."""
    every: list[dict[str, Any]] = [json.loads(settings) for settings in groups]
    names = sorted({name for settings in every for name in settings})
    differ = [name for name in names if len({json.dumps(settings.get(name)) for settings in every}) > 1]
    return [", ".join(_said(name, settings.get(name)) for name in differ) for settings in every]


def _said(name: str, value: Any) -> str:
    return name if value is True else f"no {name}" if value is False else f"{name} {value}"


def _series(group: Sequence[tuple[float, Mapping[str, Any]]], figure: str, label: str) -> Series:
    """The figure at each threshold where it was measured."""
    points: list[tuple[float, float, float, float]] = []
    for threshold, row in sorted(group, key=lambda item: item[0]):
        rate, samples = number(row[figure]), number(row["samples"])
        if rate is not None and samples:
            points.append((threshold, rate, *wilson(round(rate * samples), round(samples))))
    x, y, low, high = ([point[place] for point in points] for place in range(4))
    return Series(label, x, y, low, high)


def _commands(found: Rows) -> Block:
    each = "".join(
        f"<p>{text(row['name'])}</p><pre>{text(run_command_of(json.loads(row['settings'] or '{}')))}</pre>"
        for row in found
    )
    return Block(f"<details><summary>The command of each experiment</summary>{each}</details>")
