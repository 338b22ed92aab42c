"""The quality frontier of blending: how much recomputation makes its answers equal to those of full computation.

Prompts are changed in several ways; the donors' state is blended into each changed prompt at several shares, by several
maps and selectors. Every case is written to `cases.jsonl` when it is finished, so a stopped run continues where it stopped.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejakv.engines.transformers.continuation import twin_of
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.experiments.plain_words import counted
from dejakv.experiments.summary import Progress
from research.frontier.bench import Bench
from research.frontier.cases import Cases, DocsCases, TextCases
from research.frontier.cells import SHARES, Cell, cells, text_cells
from research.frontier.folder import CASES, held_cases, merge, open_cases
from research.frontier.report import write_report

FACTS = 20
PASSAGES = 4


def run_frontier(
    model: str = "docs-lm",
    samples: int = 300,
    output: str | Path = "runs/frontier",
    *,
    facts: int | None = None,
    kinds: Sequence[str] = (),
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    only: Sequence[str] = (),
    detail: int | None = None,
    watch: Progress | None = None,
) -> dict[str, Any]:
    """Measures and writes `cases.jsonl`, `frontier.json` and `frontier-table.md`.

    model    docs-lm reads documents of facts with known answers; any other reads passages of real text
    samples  cases of each kind; kinds, only: names of kinds of change and of cells, all if empty
    facts    facts in a document of docs-lm (20), passages in a prompt of another model (4)
    detail   cases of each kind for all cells, the other cases only for the main cells; None: all cells on all cases
    In a folder with a run of the same settings, missing cases and cells are added, other cells than before too. A folder with other settings is refused.

    Raises: ConfigError, ModelError.
    """
    if samples < 1 or (facts is not None and facts < 2):
        raise ConfigError(f"--samples {samples}, --facts {facts}: give at least 1 sample and 2 facts")
    if detail is not None and detail < 0:
        raise ConfigError(f"--detail {detail} is negative: give 0 or more")
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise ConfigError(f"shares={tuple(shares)} are out of range: give numbers from 0 to 1")
    known, cases = _of_model(model, facts, shares)
    chosen = [cell for cell in known if not only or cell.name in only]
    if only and len(chosen) != len(set(only)):
        raise ConfigError(
            f"--only names an unknown way of blending: choose from {', '.join(cell.name for cell in known)}"
        )
    if unknown := [kind for kind in kinds if kind not in cases.kinds]:
        raise ConfigError(f"--kind {unknown[0]!r} is unknown: choose from {', '.join(cases.kinds)}")
    kinds = [kind for kind in cases.kinds if not kinds or kind in kinds]
    folder, watch = open_cases(output), watch or Progress()
    watch.stage(f"loading {model}")
    engine = TransformersEngine.from_pretrained(model, dtype="fp32")
    bench = Bench(engine, cases.steps, twin_of(engine) if cases.steps > 1 else None)
    settings = {"model": Path(model).name, "epoch": engine.epoch, "seed": seed, **cases.settings()}
    held = held_cases(folder, settings, [cell.name for cell in chosen])
    todo: list[tuple[str, int, list[Cell]]] = []
    for number in range(samples):
        for kind in kinds:
            there = held.get((kind, number), {}).get("rows", {})
            wanted = [cell for cell in chosen if cell.main or detail is None or number < detail]
            missing = [cell for cell in wanted if cell.name not in there]
            if missing or not there:
                todo.append((kind, number, missing))
    watch.stage(f"{settings['model']}: {counted(len(todo), 'case')} to measure")
    with (folder / CASES).open("a", encoding="utf-8") as file:
        for count, (kind, number, missing) in enumerate(todo):
            line = bench.run(cases.make(kind, number, bench.encode, seed), missing)
            merge(held, line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            watch.sample(count + 1, len(todo), None)
    used = [line for line in held.values() if line["number"] < samples and line["kind"] in kinds]
    return write_report(folder, {**settings, "samples": samples}, used, {cell.name: cell for cell in chosen}, kinds)


def _of_model(model: str, facts: int | None, shares: Sequence[float]) -> tuple[list[Cell], Cases]:
    """The cells and cases for a model."""
    if Path(model).name == "docs-lm":
        return cells(shares), DocsCases(facts or FACTS)
    return text_cells(), TextCases(facts or PASSAGES)
