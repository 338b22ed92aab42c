"""What blends would save beyond exact prefixes, by the least share that they have to save.

    OMP_NUM_THREADS=1 python -m research.blend_gains [--requests 30]

The requests of `research.agents`, `rag` and `repo` are planned one after another and not computed:
every prompt is stored exactly before the next, as idle time does, with state of one number a token.
"""

from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer

from research.agents import KINDS, PRESET
from research.command import run

SHARES = (0.0, 0.15, 0.2, 0.25, 0.3)
COSTS = (3e-3, 5e-7, 0.0, 2e-5)
"""Seconds of a token, a pair and a token of a blend, about SmolLM2-135M's on one core."""


def gains_of(dataset: str, model: str, requests: int) -> list[tuple[int, int]]:
    """Return for each request the tokens behind its exact prefix, and those that a blend saves."""
    from dejakv.build import build_guards
    from dejakv.cache import HierarchicalCache
    from dejakv.decide.costs import ReuseCosts
    from dejakv.engines.base import Completion, Prepared
    from dejakv.engines.open import open_templates
    from dejakv.experiments.samples import SamplePrompter, read_samples
    from dejakv.experiments.settings import settings_from
    from dejakv.request import Request
    from dejakv.store.base import RawTensor
    from dejakv.store.open import open_store

    preset = dataset if dataset in ("rag", "repo") else PRESET
    settings = settings_from(
        preset, {"model": model, "dataset": dataset, "max_samples": requests}, {}
    )
    if dataset.startswith("research."):
        settings = replace(settings, window=None)
    config = replace(settings.cache, reuse="blend", semantic_text=False, min_gain_share=0.0)
    templates: Any = open_templates(settings)
    prompter = SamplePrompter(templates, settings.prompt_template, settings.chunk_source)
    tokenizer = getattr(templates, "tokenizer", templates)
    costs = ReuseCosts(row=COSTS[0]).fixed(COSTS)
    gains: list[tuple[int, int]] = []
    with closing(
        HierarchicalCache(open_store(), [], build_guards(config, []), config, background=False)
    ) as cache:
        for sample in read_samples(settings):
            text = prompter.prompt(sample)
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            prepared = Prepared(Request(sample.id, text, text), ids, epoch="planned")
            decision = cache.find(prepared, costs=costs)
            prefix = max(plan.reused for plan in decision.considered if not plan.approximate)
            blended = decision.plan.reused if decision.plan.method == "blend" else prefix
            gains.append((len(ids) - prefix, blended - prefix))

            exact = cache.finder.decide_exact(prepared, costs=costs)
            state = RawTensor(np.zeros((2, 1, 1, len(ids), 1), np.float32), "F32")
            completion = Completion("", (), len(ids), 0, capture=lambda state=state: state)
            cache.keep(prepared, exact, exact.plan, completion)
    return gains


def blend_gains(
    model: Annotated[str, typer.Option(help="Model whose tokenizer counts.")] = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 30,
) -> None:
    """Print blends, and tokens by prefix caching's, by kind and least share."""
    kinds = {**KINDS, "rag": "rag", "repo": "repo"}
    gains = {kind: gains_of(dataset, model, requests) for kind, dataset in kinds.items()}
    typer.echo(f"| least share | {' | '.join(gains)} |")
    typer.echo("|---" * (len(gains) + 1) + "|")
    for share in SHARES:
        cells: list[str] = []
        for pairs in gains.values():
            saved = [gain for behind, gain in pairs if 0 < gain >= share * behind]
            tokens = 1 - sum(saved) / sum(behind for behind, _ in pairs)
            cells.append(f"{len(saved)}: {tokens:.2f}")
        typer.echo(f"| {share:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run(blend_gains)
