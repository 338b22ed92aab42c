"""Requests about two documents that the bundled model reads, for tests of the whole path."""

import random
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request, Sampling
from dejakv_models.docs import ask, make_document, prompt_of

RNG = random.Random(3)
DOCUMENT = make_document(RNG, facts=20)
OTHER = make_document(RNG, facts=20)
FACT = DOCUMENT.facts[3]
COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Fixed: what is measured on a busy machine may speak for another plan."""
ADOPT = SemanticCacheConfig(reuse="adopt", index_encoder="model", similarity_threshold=0.0, min_gain=1, costs=COSTS)
EXACT = SemanticCacheConfig(index_encoder="model", costs=COSTS)


def request(question: str, context: str = DOCUMENT.text, **more: Any) -> Request:
    prompt = prompt_of(context, question)
    return Request("r", prompt, more.pop("chunk", question), sampling=Sampling(4), **more)


def wordings() -> tuple[str, str]:
    """One question in two wordings."""
    found = sorted({ask(FACT, random.Random(seed)) for seed in range(40)})
    return found[0], found[1]


def uncached(engine: Any, wanted: Request) -> Answer:
    return Pipeline(engine).answer(wanted)
