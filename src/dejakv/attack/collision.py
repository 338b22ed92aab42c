"""Key collision: a stored text that the encoder takes for a victim's prompt, though it asks something else."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dejakv.attack.base import Result, judged
from dejakv.attack.collision_search import Encode, climb, mutations
from dejakv.attack.figures import Figure, Share
from dejakv.attack.scene import Scene
from dejakv.config import DEFAULT_ENCODER, SIMILARITY_THRESHOLD
from dejakv.encoders.text import ModelTextEncoder, text_encoder
from dejakv.errors import DejaKVError
from dejakv.guards.chain import judge
from dejakv.levels.base import Match
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import ChunkMeta

USUAL = ("model", DEFAULT_ENCODER)
"""Encoders that are attacked unless others are named; one that cannot be loaded is left out, and the report says so."""
PAYLOAD = 2
"""Facts of an attacker's text."""
SLOW = 8
"""How many times fewer texts and victims an encoder gets that is a model of its own."""


@dataclass(frozen=True)
class KeyCollision:
    name: str = "key collision"
    tries: str = (
        "hill climbing over words for a text of other content that the index encoder takes for a victim's prompt, and "
        "changes of one word that are hidden from the guards; both are stored in the victim's own partition"
    )
    broken_if: str = (
        "such a text is used for the victim's prompt, under exact reuse or by adopt with the default guards"
    )
    outside: bool = False

    def run(self, scene: Scene) -> Result:
        figures: dict[str, Figure] = {}
        findings: list[str] = []
        notes: list[str] = []
        engine = scene.engine
        for name in scene.encoders or USUAL:
            try:
                encoder = text_encoder(name, embed=engine.embed_text, fingerprint=engine.epoch)
            except DejaKVError:
                if scene.encoders:
                    raise
                figures[f"{name}: left out"] = "not installed or not on this machine"
                continue
            search = _Search(scene, name, encoder.encode_many, isinstance(encoder, ModelTextEncoder))
            findings += search.run(figures)
            notes.append(
                f"{name}: {search.victims} victims, {search.embedded} texts embedded, {search.mutated} changed ones"
            )
        return judged("; ".join(notes), findings, figures)


class _Search:
    def __init__(self, scene: Scene, name: str, encode: Encode, cheap: bool) -> None:
        self.scene, self.name, self.encode = scene, name, encode
        effort, less = scene.effort, 1 if cheap else SLOW
        self.victims = max(2, effort.victims // less)
        self.texts, self.mutations = effort.texts // less, effort.mutations // less
        self.embedded = self.mutated = 0

    def run(self, figures: dict[str, Figure]) -> list[str]:
        rng, material = self.scene.rng(f"collision/{self.name}"), self.scene.material
        findings: list[str] = []
        served: Counter[str] = Counter()
        collided = passed = stored_texts = 0
        guards: Counter[str] = Counter()
        nearest: list[float] = []
        with self._pipeline() as pipeline:
            for number in range(self.victims):
                victim = material.any_prompt(rng)
                payload = replace(material, facts=PAYLOAD).any_prompt(rng)
                found = climb(self.encode, victim, payload, SIMILARITY_THRESHOLD, self.texts, rng)
                self.embedded += found.embedded
                nearest.append(found.cosine)
                stored = [found.text] if found.cosine >= SIMILARITY_THRESHOLD else []
                collided += len(stored)
                hidden = self._past_the_guards(pipeline, victim, rng)
                passed += len(hidden)
                for text in (*stored, *hidden[:3]):
                    used, refused = _attacked(pipeline, f"victim {number}", victim, text)
                    stored_texts += 1
                    served.update(used)
                    guards.update(refused)
                    findings += [
                        f"{self.name}: a text of other content was used under {mode}: {text[-80:]!r}" for mode in used
                    ]
        figures[f"{self.name}: victims with a collision by cosine"] = Share(collided, self.victims)
        figures[f"{self.name}: cosine reached, median"] = round(median(nearest), 3)
        figures[f"{self.name}: changed texts that pass the guards"] = Share(passed, self.mutated)
        for mode in ("exact", "adopt"):
            figures[f"{self.name}: used under {mode}"] = Share(served[mode], stored_texts)
        figures[f"{self.name}: refused by"] = (
            ", ".join(f"{guard} {count}" for guard, count in guards.most_common()) or "none"
        )
        return findings

    @contextmanager
    def _pipeline(self) -> Iterator[Pipeline]:
        encoder = {"index_encoder": self.name, "similarity_threshold": SIMILARITY_THRESHOLD}
        with self.scene.pipeline(**encoder, reuse="exact") as pipeline:
            yield pipeline

    def _past_the_guards(self, pipeline: Pipeline, victim: str, rng: random.Random) -> list[str]:
        assert pipeline.cache is not None
        found: list[str] = []
        for text in mutations(victim, self.mutations, rng):
            self.mutated += 1
            donor = ChunkMeta("d", "p", "e", (), text, text)
            verdict = judge(
                pipeline.cache.finder.guards, Request("v", victim, victim, partition="p"), donor,
                Match("d", "semantic_text", 1.0),
            )  # fmt: skip
            if verdict.decision == "accept":
                found.append(text)
        return found


def _attacked(pipeline: Pipeline, partition: str, victim: str, text: str) -> tuple[list[str], list[str]]:
    """Stores a text and asks for the victim's prompt: the ways in which the text was used, and the guards that refused it."""
    assert pipeline.cache is not None
    asked = Request("victim", victim, victim, partition=partition, sampling=Sampling(1))
    pipeline.cache.clear(partition)
    pipeline.answer(replace(asked, id="attacker", prompt=text, chunk=text))
    used: list[str] = []
    refused: list[str] = []
    for mode in ("exact", "adopt"):
        wanted: Any = replace(asked, reuse=mode)
        record = pipeline.answer(wanted, no_store=True).record
        if record.method in ("exact", "adopt", "blend"):
            used.append(mode)
        elif mode == "adopt" and record.reason:
            refused.append(record.reason.partition(":")[0])
    return used, refused
