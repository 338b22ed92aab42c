"""What a bound on foreign context costs: tokens computed with it and without.

    OMP_NUM_THREADS=1 python -m research.stranger.price --output FILE.json [--requests 30]

Requests of each kind go through prefix caching, through blends without a bound, and through blends
with `foreign_context` at each limit. How many tokens a blend computes follows from the tokens and
their embeddings, hardly from what a model makes of them, so a toy model of random weights with
SmolLM2's tokenizer serves: tokens alone are reported.
"""

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from research.agents import KINDS as SESSIONS
from research.agents import PRESET
from research.command import run

KINDS = ("rag", "repo", *SESSIONS)
LIMITS = (16, 0)
COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Computed tokens alone cost time: what saves tokens runs."""


def stream_named(kind: str, requests: int) -> Any:
    """Return the requests of a kind, as the pages about workloads and agents have them."""
    from dataclasses import replace

    from dejakv.experiments.settings import settings_from
    from research.workloads.streams import Stream, stream_of

    if kind not in SESSIONS:
        return stream_of(kind, "transformers", requests)
    settings = settings_from(PRESET, {"dataset": SESSIONS[kind], "max_samples": 10 * requests}, {})
    settings = settings if kind == PRESET else replace(settings, window=None)
    return Stream(settings, requests, lengths=(1, 1 << 20))


def tokens_of(kind: str, requests: int) -> dict[str, Any]:
    """Return the tokens that each arm computes of one kind's requests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dejakv import Pipeline, SemanticCacheConfig
    from dejakv.build import build_cache
    from dejakv.engines.transformers import TransformersEngine
    from research.workloads.streams import chosen_of

    samples, prompter, _ = chosen_of(stream_named(kind, requests))
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1 << 16,
    )  # fmt: skip
    engine = TransformersEngine(LlamaForCausalLM(config).eval(), prompter.templates)
    arms = {"prefix": {"reuse": "exact"}, "blend": {}}
    arms |= {f"blend, {limit}": {"foreign_context": limit} for limit in LIMITS}
    made: dict[str, Any] = {}
    for name, more in arms.items():
        settings = {"reuse": "blend", "costs": COSTS, "semantic_text": False, **more}
        cache = build_cache(SemanticCacheConfig(**settings), engine, background=False)
        with closing(cache):
            pipeline, methods = Pipeline(engine, cache), Counter[str]()
            computed = prompts = 0
            for sample in samples:
                record = pipeline.answer(prompter.request(sample)).record
                methods[record.method] += 1
                computed += record.computed_tokens
                prompts += record.prompt_tokens
        made[name] = {"computed": computed, "prompts": prompts, "methods": dict(methods)}
    return made


def price(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)} (default: all).")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each kind.")] = 30,
) -> None:
    """Count the tokens that a bound on foreign context costs."""
    import torch

    from dejakv.experiments.output import make_folder, replace_file
    from research.machine import measured

    torch.set_num_threads(1)
    make_folder(output.parent)
    kinds: dict[str, Any] = {}
    for name in kind or KINDS:
        torch.manual_seed(0)
        kinds[name] = tokens_of(name, requests)
        base = kinds[name]["prefix"]["computed"]
        for arm, row in kinds[name].items():
            row["by_prefix"] = round(row["computed"] / base, 3)
            typer.echo(f"{name:12} {arm:10} {row['by_prefix']:.3f} {row['methods']}")
        report = {"requests": requests, "kinds": kinds, **measured("research.stranger.price")}
        replace_file(output, json.dumps(report, indent=1) + "\n", "--output")


if __name__ == "__main__":
    run(price)
