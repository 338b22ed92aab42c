"""Whether a donor that is only alike should join those that hold copied text: divergence and rows with and without it.

    python benchmarks/like_donors.py [--model smollm2-135m] [--cases 6] [--output like_donors.json]

A prompt has a passage that an earlier prompt holds word for word (its donor by copied text), and one that is a rewording of a
passage of another earlier prompt (its donor by likeness). It is blended three times: from the donor of copied text alone; from
both; and from both with as many rows as the first one computed. Divergence is from full computation, along its 16 greedy tokens;
`bf16` is the same model in bf16, computed in full.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from reworded import PASSAGES

from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.twin import twin_of
from dejakv.experiments.frontier.bench import NOISE, Bench
from dejakv.experiments.frontier.cases import Case
from dejakv.experiments.frontier.cells import Cell, quality_cells
from dejakv.experiments.frontier.text_cases import ASK, INSTRUCTIONS, SUMMARIZE, passages_of_manuals, prompt

STEPS = 16
ALONE, BOTH, EQUAL = "copied alone", "copied and like", "the same, as many rows"


def case_of(bench: Bench, number: int, kind: str) -> Case:
    """`kind`: `light` or `heavy`, the rewording of one passage. The other passage comes word for word from another prompt."""
    rng = random.Random(f"like-donors/{kind}/{number}")
    passage = PASSAGES[number % len(PASSAGES)]
    copied, first, second = (each.text for each in rng.sample(passages_of_manuals(), 3))
    question, begins = (part.format(name=passage.title) for part in SUMMARIZE)
    other = ASK[0].format(name="the module")
    target = prompt(INSTRUCTIONS[0], [copied, getattr(passage, kind)], question, begins)
    holds_copied = prompt(INSTRUCTIONS[0], [first, copied], other, ASK[1].format(name="the module"))
    holds_like = prompt(INSTRUCTIONS[0], [second, passage.text], question, begins)
    return Case(kind, number, bench.encode(target), (bench.encode(holds_copied), bench.encode(holds_like)), None, None)


def measured(bench: Bench, case: Case, cell: Cell) -> dict[str, Any]:
    """Rows of the case by the way it was computed."""
    alone = replace(case, donors=case.donors[:1])
    found = bench.run(alone, [replace(cell, quality=ALONE)])["rows"]
    found |= bench.run(case, [replace(cell, quality=BOTH)])["rows"]
    found |= bench.run(case, [replace(cell, quality=EQUAL, share=found[ALONE]["share"])])["rows"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", type=int, default=len(PASSAGES), help="of each kind")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = TransformersEngine.from_pretrained(options.model, dtype="fp32")
    bench = Bench(engine, STEPS, twin_of(engine))
    (cell,) = [each for each in quality_cells() if each.quality == "default"]
    results: dict[str, list[dict[str, Any]]] = {}
    for kind in ("light", "heavy"):
        results[kind] = []
        for number in range(options.cases):
            results[kind].append(measured(bench, case_of(bench, number, kind), cell))
            print(
                f"{kind} {number}: " + ", ".join(_line(name, row) for name, row in results[kind][-1].items()),
                flush=True,
            )
        for name in (ALONE, BOTH, EQUAL, NOISE):
            of = [rows[name] for rows in results[kind]]
            about = {key: mean(row[key] for row in of) for key in ("share", "kl", "kl_mean", "top1")}
            print(f"{kind}, {options.cases} cases: {_line(name, about)}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _line(name: str, row: dict[str, Any]) -> str:
    return f"{name} rows {row['share']:.1%} KL1 {row['kl']:.4f} KL16 {row['kl_mean']:.4f} top-1 {row['top1']:.3f}"


if __name__ == "__main__":
    sys.exit(main())
