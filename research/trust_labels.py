"""A table of labelled requests: what a blend says, beside full computation of the same prompt, one line for each would-be hit.

    python -m research.trust_labels --workload rag --requests 850 --set passages=2 --tokens 6 --output runs/labels/rag.jsonl

Each request of a workload is looked up in a cache that holds the exact state of all requests before it, as while a gate is closed.
Where a blend applies it runs, and so does full computation; both answer greedily. Answers, the divergence of the first token in nats, and
what was known of the plan are written as they come. `python -m research.trust replay` reads the table.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.build import build_cache
from dejakv.datasets.registry import WORKLOADS
from dejakv.decide.plan import Ask
from dejakv.engines.base import Completion, Prepared, Refusal
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import DejaKVError
from dejakv.experiments.fidelity import certainty
from dejakv.experiments.settings import RunSettings
from dejakv.request import Request, Sampling
from dejakv.store.open import open_store
from dejakv.trust.differs import divergence
from dejakv.trust.features import features_of
from research.workloads.streams import chosen_of, stream_of

COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Fixed: rows decide, so that the table is the same on every machine."""

BYTES = 5 * 1024**3
"""Of the store: of SmolLM2's state about 300 prompts of 350 tokens."""


def first_token(completion: Completion, along: Sequence[int]) -> NDArray[np.float32]:
    """Log probabilities of the first token of an answer, `[1, vocabulary]`."""
    logs = completion.continued(along)
    assert logs is not None
    return logs[:1]


def label(full: Completion, blended: Completion) -> dict[str, Any]:
    """How the two differ."""
    along = full.token_ids[:1]
    true, made = first_token(full, along), first_token(blended, along)
    return {
        "wrong": {
            "first": full.token_ids[:1] != blended.token_ids[:1],
            "answer": full.token_ids != blended.token_ids,
        },
        "kl": round(float(divergence(true, made)[0]), 6),
        **{name: round(value, 4) for name, value in certainty(made).items()},
        "computed_tokens": blended.computed_tokens,
    }


def _exact(ran: Completion | Refusal, engine: TransformersEngine, prepared: Prepared) -> Completion:
    return ran if isinstance(ran, Completion) else engine.full(prepared)


def rows(
    engine: TransformersEngine, settings: RunSettings, asked: Sequence[Request], tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each request for which a blend ran."""
    config = replace(settings.cache, reuse="blend", costs=COSTS, max_generation=0)
    cache = build_cache(config, engine, store=open_store(max_bytes=BYTES), background=False)
    sampling = Sampling(max_new_tokens=tokens)
    for number, request in enumerate(asked):
        prepared = replace(engine.prepare(request), epoch=engine.epoch).sampled(sampling)
        decision = cache.find(prepared, Ask("blend"), costs=engine.costs())
        full = _exact(engine.run(prepared, decision.exact, cache.store), engine, prepared)
        if decision.plan.method == "blend":
            made = engine.run(prepared, replace(decision.plan, most=1.0), cache.store)
            if isinstance(made, Completion):
                known = features_of(decision.plan, decision.found, decision.tokens)
                told = {name: round(value, 6) for name, value in known.items()}
                yield {
                    "request": number, "workload": settings.dataset, "model": settings.model, "method": "blend",
                    "setting": config.blend_quality, "score": told["score"], "features": told,
                    "prompt_tokens": decision.tokens, **label(full, made),
                }  # fmt: skip
        cache.keep_exact(prepared, cache.finder.exactly(prepared), full)
    cache.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m research.trust_labels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--least", type=int, default=120, help="prompt tokens, default 120")
    parser.add_argument("--most", type=int, default=400, help="prompt tokens, default 400")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer, default 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="NAME=NUMBER, an option of the workload: passages=2")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    options: Mapping[str, int] = {name: int(value) for name, _, value in (one.partition("=") for one in given.set)}
    try:
        stream = stream_of(given.workload, "transformers", given.requests)
        settings = replace(stream.settings, max_samples=40 * given.requests, seed=given.seed, **options)
        samples, prompter, total = chosen_of(replace(stream, settings=settings, lengths=(given.least, given.most)))
        engine = TransformersEngine.from_pretrained(settings.model, dtype="fp32")
        print(f"{len(samples)} prompts of {total / len(samples):.0f} tokens", file=sys.stderr)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with given.output.open("w") as file:
            for row in rows(engine, settings, [prompter.request(sample) for sample in samples], given.tokens):
                file.write(json.dumps(row) + "\n")
                file.flush()
    except DejaKVError as error:
        print(f"research.trust_labels: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
