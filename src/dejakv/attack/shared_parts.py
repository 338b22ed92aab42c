"""What partitions could share inside the process: the order of parts, encoder outputs, fusion states, budgets, named donors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dejakv.attack.base import Result, judged
from dejakv.attack.figures import Figure
from dejakv.attack.scene import Scene
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.base import Prepared
from dejakv.find.ask import Ask
from dejakv.find.ways import Plan
from dejakv.fusing import Fusing
from dejakv.identity import exact_key
from dejakv.levels.base import Match
from dejakv.levels.fusion import FusionState
from dejakv.request import Request, Sampling
from dejakv.store.base import Chunk, ChunkMeta, Store, Tensor
from dejakv.store.open import open_store

OWNER, PROBER = "owner", "prober"
PARTS = 2
"""Partitions among which a budget is divided."""


@dataclass(frozen=True)
class SharedParts:
    """registry, store  what makes the parts that are probed"""

    registry: Callable[[], VisualKVCache] = VisualKVCache
    store: Callable[..., Store] = open_store
    name: str = "probing in the process"
    tries: str = (
        "what one partition computed is looked for from another one: the order of its parts, donors by their ids, outputs of "
        "encoders, states of fusion modules, evictions from a budget in parts"
    )
    broken_if: str = "any of it is found, counted or evicted from another partition"
    outside: bool = False

    def run(self, scene: Scene) -> Result:
        findings: list[str] = []
        figures: dict[str, Figure] = {}
        for name, look in (
            ("part order", _part_order), ("named donors", _named_donors), ("encoder outputs", self._encoder_outputs),
            ("fusion states", self._fusion_states), ("budgets", self._budgets),
        ):  # fmt: skip
            found = look(scene)
            findings += found
            figures[name] = "crossed" if found else "held"
        return judged(f"{len(figures)} parts, {scene.effort.probes} times each", findings, figures)

    def _encoder_outputs(self, scene: Scene) -> list[str]:
        cache, found = self.registry(), list[str]()
        for number in range(scene.effort.probes):
            content = f"{number:064x}"
            before = cache.view("e", PROBER).stats()
            cache.view("e", OWNER).get_or_compute(content, "image", lambda: np.ones((2, 4), np.float32))
            if cache.view("e", PROBER).stats() != before:
                found.append("a partition's figures of encoder outputs change with another's pictures")
            if cache.view("e", PROBER).lookup(content, "image") is not None:
                found.append("a partition finds an encoder output of another one")
        cache.close()
        return found

    def _fusion_states(self, scene: Scene) -> list[str]:
        registry, store = self.registry(), self.store(None)
        fusing = Fusing(_Provider(), registry, store)
        found: list[str] = []
        for number in range(scene.effort.probes):
            donor = _chunk(OWNER, number).meta
            owned, probed = (_prepared(partition, donor.token_ids) for partition in (OWNER, PROBER))
            fusing.capture(None, owned, donor.id, Plan("none"))
            if fusing.inject(None, probed, Plan("exact", (donor,), Match(donor.id, "exact_text", 1.0))) == "hit":
                found.append("a partition gets a fusion state of another one")
        fusing.close()
        registry.close()
        return found

    def _budgets(self, scene: Scene) -> list[str]:
        store, found = self.store(None, partitions=PARTS, max_entries=4 * PARTS), list[str]()
        kept = _chunk(OWNER, 0)
        store.put(kept)
        before = store.stats(OWNER)
        for number in range(10 * scene.effort.probes):
            store.put(_chunk(PROBER, number))
        if store.meta(kept.meta.id) is None:
            found.append("filling one partition evicted an entry of another")
        elif store.stats(OWNER) != before:
            found.append("filling one partition changed another's figures")
        store.close()
        return found


def _part_order(scene: Scene) -> list[str]:
    rng = scene.rng("part order")
    with scene.pipeline() as pipeline:
        for _ in range(scene.effort.probes):
            parts = tuple(scene.material.document(rng).text for _ in range(3))
            record = None
            for partition, order in ((OWNER, parts), (PROBER, parts[::-1])):
                prompt = f"Read this. {' '.join(order)} Who is it?"
                asked = Request("r", prompt, prompt, (), partition, Sampling(1), parts=order, order="free")
                record = pipeline.answer(asked).record
            if record is not None and (record.order or record.reused_tokens):
                return ["the order of a prompt's parts follows what another partition has sent"]
            for partition in (OWNER, PROBER):
                assert pipeline.cache is not None
                pipeline.cache.clear(partition)
    return []


def _named_donors(scene: Scene) -> list[str]:
    """A caller that learned the id of another partition's chunk names it as its donor."""
    rng = scene.rng("named donors")
    with scene.pipeline(reuse="adopt") as pipeline:
        cache = pipeline.cache
        assert cache is not None
        for _ in range(scene.effort.probes):
            pair = scene.material.near_duplicate(rng)
            left = pipeline.answer(Request("r", pair.prompt, pair.prompt, (), OWNER, Sampling(1))).record.key
            for prompt in (pair.prompt, pair.duplicate):
                asked = pipeline.engine.prepare(Request("r", prompt, prompt, (), PROBER, Sampling(1)))
                asked = replace(asked, epoch=pipeline.engine.epoch)
                for mode in ("exact", "adopt", "blend"):
                    if cache.find(asked, Ask(mode, named=(left,))).plan.donors:
                        return [f"a donor of another partition is used under {mode} by a caller that names its id"]
    return []


def _prepared(partition: str, tokens: tuple[int, ...]) -> Prepared:
    return Prepared(Request("r", "prompt", "chunk", partition=partition), tokens, epoch="e")


class _Provider:
    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
        return FusionState(chunk_id, {"fusion_output": np.ones((2, 4), np.float32)})

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        return True


def _chunk(partition: str, number: int) -> Chunk:
    tokens = (number, 1, 2, 3)
    meta = ChunkMeta(exact_key(partition, "e", tokens, ()), partition, "e", tokens, f"prompt {number}", "chunk")
    return Chunk(meta, Tensor(np.full((2, 1, 1, 4, 4), number, np.float32), "F32"))
