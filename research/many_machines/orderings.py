"""A gain that lasts: one corpus of passages in ever new orders, under a tight budget."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import factorial
from typing import Any

from dejakv.engines.transformers import TransformersEngine
from dejakv.experiments.compare import close_all, pipeline_for
from dejakv.records import Record
from dejakv.request import Request, Sampling
from research.frontier.cases import passages_of_manuals
from research.many_machines.hits import COSTS
from research.many_machines.services import Services
from research.workloads.figures import paired
from research.workloads.streams import stream_of

PASSAGES = 6
BUDGET = 1.2
"""Times the bytes of the corpus."""
QUARTERS = 4


def gain(services: Services, orderings: int, model: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Blend from a bucket beside prefix caching (in memory, of the same budget), each prompt with
    all passages in another order and a question.

    model  a name, or an engine

    In each quarter, by prefix caching's: `computed` (tokens) and `ttft` (with 95%), and entries
    evicted so far.
    """
    own = (
        TransformersEngine.from_pretrained(model, dtype="fp32", device="cpu")
        if isinstance(model, str)
        else model
    )
    requests, tokens = _requests(own, orderings, list(texts))
    budget = round(BUDGET * tokens * token_bytes(own))
    config = replace(
        stream_of("rag", "transformers").settings.cache,
        store=services.place(),
        max_bytes=budget,
        costs=COSTS,
        memory_bytes=0,
    )
    pipelines = {
        "prefix": pipeline_for("prefix", own, config),
        "blend": pipeline_for("cache", own, config, "blend"),
    }
    cache = pipelines["blend"].cache
    assert cache is not None
    rows: dict[str, list[Record]] = {name: [] for name in pipelines}
    held: list[int] = []
    evicted: list[int] = []
    for number, request in enumerate(requests):
        for name in sorted(pipelines, reverse=bool(number % 2)):
            rows[name].append(pipelines[name].answer(request).record)
            pipeline = pipelines[name].cache
            assert pipeline is not None
            pipeline.flush()
        stats = cache.store.stats()
        held.append(stats.bytes)
        evicted.append(sum(stats.evictions.values()))
    close_all(pipelines)
    cuts = [len(requests) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    return {
        "orderings": len(requests),
        "passages": len(texts),
        "corpus_tokens": tokens,
        "budget": BUDGET,
        "most_bytes_by_budget": max(held) / budget,
        "quarters": [
            _quarter({name: some[start:stop] for name, some in rows.items()})
            | {"evictions": evicted[stop - 1]}
            for start, stop in pairwise(cuts)
        ],
    }


def token_bytes(engine: Any) -> int:
    """Return the bytes of one token's state in float32."""
    config = engine.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4


def _quarter(rows: dict[str, list[Record]]) -> dict[str, Any]:
    prefix, blend = rows["prefix"], rows["blend"]
    computed = {name: sum(record.computed_tokens for record in some) for name, some in rows.items()}
    ratio = paired([record.ttft_ms for record in prefix], [record.ttft_ms for record in blend])
    return {
        "computed": computed["blend"] / computed["prefix"],
        "ttft": ratio and [ratio["ratio"], *ratio["ratio_interval"]],
        "blends": sum(record.method == "blend" for record in blend),
        "requests": len(blend),
    }


def passages_of(many: int, characters: int | None = None) -> list[str]:
    """Return texts of about 140 of SmolLM2's tokens, or their beginnings."""
    return [
        passage.text[:characters]
        for passage in random.Random("orderings").sample(passages_of_manuals(), many)
    ]


def _requests(engine: Any, orderings: int, texts: list[str]) -> tuple[list[Request], int]:
    """The prompts, each in an order of its own, and the tokens of all passages."""
    rng, tokens = (
        random.Random("orderings"),
        sum(len(engine.tokenizer(text)["input_ids"]) for text in texts),
    )
    made: list[Request] = []
    seen: set[tuple[str, ...]] = set()
    while len(made) < min(orderings, factorial(len(texts))):
        rng.shuffle(texts)
        if tuple(texts) in seen:
            continue
        seen.add(tuple(texts))
        question = f"What is said about {' '.join(rng.choice(texts).split()[:4])}?"
        prompt = "<|im_start|>user\nAnswer from these passages.\n\n" + "\n\n".join(texts)
        prompt += f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
        made.append(Request(str(len(made)), prompt, question, sampling=Sampling(4)))
    return made, tokens
