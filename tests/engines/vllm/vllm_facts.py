"""Documents of facts for `docs-lm`, the same ones in another order, and donors of their blends."""

import random
import re
from dataclasses import replace
from typing import Any

from tests.running import blended as run_blend
from vllm_harness import worker_side

from dejakv.blend.settings import BlendConfig
from dejakv.engines.base import Completion
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.experiments.vllm_engine import VLLMEngine
from dejakv.request import Request, Sampling
from dejakv.store.base import Chunk, ChunkMeta

PLACES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Accra")
PEOPLE = ("Ann", "Bob", "Carl", "Dora", "Emil", "Fred", "Gina", "Hans")
BLENDING = ConnectorSettings(
    modes=("off", "exact", "blend"), lookup_timeout_s=30.0, blend_share=0.15, blend_max_share=1.0
)
CONFIG = BlendConfig(share=0.15, max_share=1.0)


def request(seed: int, wanted: str = "Bob", tokens: int = 4) -> Request:
    """A document of many facts and a question about it."""
    order = random.Random(seed)
    facts = " ".join(f"{person} lives in {order.choice(PLACES)} ." for person in PEOPLE * 3)
    return Request(f"r{seed}", f"<s> {facts} <q> Where does {wanted} live ? <a>", "", sampling=Sampling(tokens))


def changed(seed: int) -> Request:
    """The document of `request(seed)` with its facts in another order."""
    first = request(seed)
    start, facts, end = re.split(r"(?<=<s> )|(?= <q>)", first.prompt)
    order = facts.split(" . ")
    return replace(first, id="changed", prompt=start + " . ".join(order[5:] + order[:5]) + end)


def joined(*seeds: int) -> Request:
    """Facts from the middle of several documents, one after the other: the beginning is none of theirs."""
    parts = [re.split(r"(?<=<s> )|(?= <q>)", request(seed).prompt) for seed in seeds]
    facts = [" . ".join(part[1].split(" . ")[9 : 9 + 24 // len(seeds)]) for part in parts]
    return replace(request(seeds[0]), id="joined", prompt=parts[0][0] + " . ".join(facts) + " ." + parts[0][2])


def donor_of(engine: VLLMEngine, asked: Request) -> Chunk:
    """The state of a request that the cache arm answered exactly, from the connector's store."""
    prepared = engine.prepare(asked)
    done = engine.run(prepared)
    assert done.capture() is not None
    stored = worker_side().store.get(done.details["vllm"]["prompt_key"])
    meta = ChunkMeta("donor", "default", "", prepared.token_ids, asked.prompt, "", "space")
    return Chunk(meta, stored.tensor)


def blended(engine: Any, seed: int, chunk: Chunk, config: BlendConfig = CONFIG) -> Completion:
    return blended_of(engine, changed(seed), [chunk], config)


def blended_of(engine: Any, asked: Request, chunks: list[Chunk], config: BlendConfig) -> Completion:
    done = run_blend(engine, engine.prepare(asked), chunks, config)
    assert done.details["blend"].blended, done.details["blend"].reason
    return done
