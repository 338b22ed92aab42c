"""`python -m research.labels`: the hits of a workload, each blended and computed in full.

They are a table for `python -m research.bound`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.blend.settings import DEFAULT, QUALITIES
from dejakv.build import build_cache
from dejakv.decide.plan import ReuseRequest
from dejakv.engines.base import Completion
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.open import open_store
from dejakv.trust.differs import divergence
from dejakv.trust.features import certainty, features_of
from research.command import run
from research.frontier.run import twin_of
from research.workloads.streams import BASE, ROUNDED, chosen_of, stream_of

COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Rows decide, so that the same prompts are hits on every machine."""
STORE_BYTES = 6 << 30
"""Of SmolLM2's state about 300 prompts of 350 tokens."""


def compared(full: Completion, other: Completion) -> dict[str, Any]:
    """How an answer differs from that of full computation."""
    along = full.token_ids[:1]
    true, made = (done.continued(along) for done in (full, other))
    assert true is not None
    assert made is not None
    return {
        "wrong": {
            "first": full.token_ids[:1] != other.token_ids[:1],
            "answer": full.token_ids != other.token_ids,
        },
        "kl": round(float(divergence(true[:1], made[:1])[0]), 6),
        "margin": round(certainty(made[0])["first_margin"], 4),
        "computed_tokens": other.computed_tokens,
    }


def labelled(
    engine: Any, config: Any, asked: Sequence[Request], qualities: Sequence[str], rounded: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number of each request, and its line if it is a hit.

    qualities  beside the default, from the same donors
    rounded    hits that are computed in bf16, too
    """
    config = replace(config, reuse="blend", costs=COSTS, max_generation=0)
    cache = build_cache(config, engine, store=open_store(max_bytes=STORE_BYTES), background=False)
    pipeline, twin = Pipeline(engine, cache), twin_of(engine) if rounded else None
    for number, request in enumerate(asked):
        prepared = replace(engine.prepare(request), epoch=engine.epoch)
        decision = cache.find(prepared, ReuseRequest("blend"), costs=cache.costs(engine))
        plan, found = decision.plan, None
        _, full = pipeline.run_plans(
            prepared, [each for each in decision.plans if not each.approximate]
        )
        if plan.method == "blend":
            made = engine.run(prepared, plan, cache.store)
            if isinstance(made, Completion):
                features = features_of(plan, decision.donor_search, decision.tokens)
                found = {
                    "request": request.id,
                    "prompt_tokens": decision.tokens,
                    "features": {name: round(value, 6) for name, value in features.items()},
                    **compared(full, made),
                }
        if found is not None:
            for name in qualities:
                other = replace(plan, config=replace(config, blend_quality=name), max_row_share=1.0)
                also = engine.run(prepared, other, cache.store)
                found[name] = compared(full, also) if isinstance(also, Completion) else None
            if twin is not None and rounded > 0:
                found[ROUNDED], rounded = (
                    compared(full, twin.run(replace(prepared, epoch=""))),
                    rounded - 1,
                )
        yield number, found
        cache.keep_exact(decision, full)
        cache.flush()
    cache.close()


def labels(
    output: Annotated[Path, typer.Argument(help="JSON lines. It must not be there.")],
    workload: Annotated[str, typer.Option(help="As of research.workloads.")] = "rag",
    requests: Annotated[int, typer.Option(min=2, help="Prompts.")] = 800,
    passages: Annotated[int, typer.Option(min=1, help="Passages in a prompt of `rag`.")] = 2,
    least: Annotated[int, typer.Option(help="Prompt tokens.")] = 120,
    most: Annotated[int, typer.Option(help="Prompt tokens.")] = 400,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 6,
    quality: Annotated[
        list[str] | None, typer.Option(help="Quality beside the default; repeatable.")
    ] = None,
    rounded: Annotated[int, typer.Option(help="Hits that are computed in bf16, too.")] = 0,
    seed: int = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Label the hits of a workload."""
    import torch

    from dejakv.engines.transformers.engine import TransformersEngine

    torch.set_num_threads(threads)
    if unknown := [name for name in quality or () if name not in QUALITIES or name == DEFAULT]:
        raise typer.BadParameter(
            f"--quality {unknown[0]}: choose of"
            f" {', '.join(each for each in QUALITIES if each != DEFAULT)}"
        )
    stream = stream_of(workload, "transformers", requests, only=[BASE])
    options = {"passages": passages} if workload == "rag" else {}
    settings = replace(stream.settings, max_samples=40 * requests, seed=seed, **options)
    chosen, prompter, total = chosen_of(replace(stream, settings=settings, lengths=(least, most)))
    asked = [replace(prompter.request(sample), sampling=Sampling(tokens)) for sample in chosen]
    typer.echo(f"{len(chosen)} prompts of {total / len(chosen):.0f} tokens", err=True)
    engine = TransformersEngine.from_pretrained(settings.model, dtype="fp32")
    hits = 0
    with output.open("x", encoding="utf-8") as file:
        for number, found in labelled(engine, settings.cache, asked, quality or (), rounded):
            if found is not None:
                hits += 1
                file.write(
                    json.dumps({"workload": workload, "model": settings.model, **found}) + "\n"
                )
                file.flush()
            if number % 50 == 49:
                typer.echo(f"{number + 1} of {len(asked)} prompts, {hits} hits", err=True)


if __name__ == "__main__":
    run(labels)
