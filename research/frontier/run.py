"""A frontier's run: each changed prompt is blended from its donors in several ways."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.errors import ConfigError, count_noun
from dejakv.experiments.output import make_folder, replace_file
from dejakv.experiments.summary import RunProgress
from research.frontier.bench import Bench
from research.frontier.cases import DocsCases, TextCases
from research.frontier.cells import CELLS
from research.frontier.report import write_report

CASES, SETTINGS = "cases.jsonl", "settings.json"


def run_frontier(
    model: str = "docs-lm",
    samples: int = 300,
    output: str | Path = "runs/frontier",
    *,
    facts: int | None = None,
    kinds: Sequence[str] = (),
    only: Sequence[str] = (),
    seed: int = 0,
    noise: bool = True,
    watch: RunProgress | None = None,
) -> dict[str, Any]:
    """Measures and writes `cases.jsonl`, `frontier.json` and `frontier-table.md`.

    model    docs-lm reads documents of facts with known answers; any other reads passages of real
             text
    samples  cases of each kind, or as many as there are; kinds, only: names of kinds of change and
             of cells, all if empty
    noise    run the other dtype, too
    facts    facts in a document of docs-lm (20), passages in a prompt of another model (4)
    In a folder with a run of the same settings, missing cases are added. A folder with other
    settings is refused.

    Raises: ConfigError, ModelError.
    """
    if samples < 1 or (facts is not None and facts < 2):
        raise ConfigError(
            f"--samples {samples}, --facts {facts}: give at least 1 sample and 2 facts"
        )
    cases = DocsCases(facts or 20) if Path(model).name == "docs-lm" else TextCases(facts or 4)
    cells = [cell for cell in CELLS if not only or cell.name in only]
    if only and len(cells) != len(set(only)):
        raise ConfigError(
            "--only names an unknown way of blending: choose from"
            f" {', '.join(cell.name for cell in CELLS)}"
        )
    if unknown := [kind for kind in kinds if kind not in cases.kinds]:
        raise ConfigError(f"--kind {unknown[0]!r} is unknown: choose from {', '.join(cases.kinds)}")
    kinds = [kind for kind in cases.kinds if not kinds or kind in kinds]
    folder, watch = make_folder(output), watch or RunProgress()
    watch.stage(f"loading {model}")
    engine = TransformersEngine.from_pretrained(model, dtype="fp32")
    bench = Bench(engine, cases.steps, twin_of(engine) if noise and cases.steps > 1 else None)
    settings = {"model": Path(model).name, "epoch": engine.epoch, "seed": seed, **cases.settings}
    held = _held(folder, {**settings, "cells": [cell.name for cell in cells]})
    todo = [
        (kind, number)
        for number in range(samples)
        for kind in kinds
        if number < cases.most.get(kind, samples) and (kind, number) not in held
    ]
    watch.stage(f"{settings['model']}: {count_noun(len(todo), 'case')} to measure")
    with (folder / CASES).open("a", encoding="utf-8") as file:
        for count, (kind, number) in enumerate(todo):
            line = bench.run(cases.make(kind, number, bench.encode, seed), cells)
            held[kind, number] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            watch.sample(count + 1, len(todo), None)
    used = [line for line in held.values() if line["number"] < samples and line["kind"] in kinds]
    return write_report(folder, {**settings, "samples": samples}, used, cells, kinds)


def _held(folder: Path, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished cases, by kind and number.

    Raises: ConfigError for a folder with other settings, or files that no frontier wrote.
    """
    text = (folder / CASES).read_text(encoding="utf-8") if (folder / CASES).exists() else ""
    known = (folder / SETTINGS).read_text(encoding="utf-8") if (folder / SETTINGS).exists() else ""
    wanted = json.dumps(settings, indent=1) + "\n"
    if known != wanted and (known or text):
        raise ConfigError(
            f"{folder} has a run of another model or other settings: give another --output, or"
            " empty it"
        )
    replace_file(folder / SETTINGS, wanted, "--output")
    if text and not text.endswith("\n"):  # the last case was cut off
        text = text[: text.rfind("\n") + 1]
        replace_file(folder / CASES, text, "--output")
    try:
        return {(line["kind"], line["number"]): line for line in map(json.loads, text.splitlines())}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / CASES} is damaged ({error}): remove its bad line, or give another --output"
        ) from error


def twin_of(engine: Any) -> Any:
    """Return an engine of the same weights in the other one of float32 and bfloat16.

    It is a copy of the model, without an encoder registry.
    """
    other = torch.bfloat16 if engine.model.dtype == torch.float32 else torch.float32
    return type(engine)(
        copy.deepcopy(engine.model).to(other), engine.tokenizer, engine.processor, check=False
    )
