"""Tenants with hostile names who ask, store, clear and look around in one cache; whatever crosses between them is an error.

A tenant's state is filled with a number that follows from its partition and epoch, so that state of another is recognised.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dejakv.build import build_guards
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import Decision
from dejakv.engines.base import Completion, Prepared
from dejakv.identity import MediumSpan
from dejakv.request import Media, Request
from dejakv.store.base import ChunkMeta, Tensor
from dejakv.store.store import Store

PARTITIONS = (
    "a", "A", "а", "á", "a\u0301", "Ａ", "a ", " a", "", ".", "..", "../a", "a/b", "a\\b", "/etc/passwd", "a\0b", "a\0",
    "default", "key-1", "x" * 5000, "x" * 5001, "ﬁ", "fi", "%", "_", "a%", "*", "?", "[a]", "None", "NULL",
    "'; DROP TABLE chunks;--", "{a}", "p:a", "a:p", "\u202ea", "\ud7ff", "🙂", "a\nb", "a\r", "e1", "exact",
)  # fmt: skip
EPOCHS = ("e1", "e2", "base+lora:1", "base+lora:2", "")
WORDS = "ann lives in paris bob rome where does live red car blue".split()
PICTURES = tuple(Media(bytes([number]) * 30) for number in range(3))


class WordEncoder:
    """Counts words: texts of the same words are alike. `encoded` counts its uses."""

    dim = 32
    fingerprint = "words"

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> Any:
        self.encoded += 1
        vector = np.full(self.dim, 1e-3, np.float32)
        for word in text.lower().split():
            vector[hashlib.md5(word.encode()).digest()[0] % self.dim] += 1
        return vector / np.linalg.norm(vector)


def mark(partition: str, epoch: str) -> np.float32:
    """The number that fills a tenant's state."""
    return np.float32(int(hashlib.sha256(f"{len(partition)}|{partition}|{epoch}".encode()).hexdigest()[:5], 16))


def cache_over(store: Store, **settings: Any) -> HierarchicalCache:
    """A cache with every level, that accepts whatever is a little alike."""
    plain: dict[str, Any] = {"reuse": "adopt", "similarity_threshold": 0.3, "lexical_guard": False, "min_gain": 0}
    config = SemanticCacheConfig(embedding_layers=("prompt:32:0.3",), **{**plain, **settings})
    encoder = WordEncoder()
    levels = [
        ExactTextCache(),
        EmbeddingCache(config.embedding_layers, "any"),
        SemanticTextCache(encoder, config.similarity_threshold),
    ]
    guards = build_guards(config, levels)

    def embed(request: Request) -> dict[str, Any]:
        return {"prompt": encoder.encode(request.chunk)}

    return HierarchicalCache(store, levels, guards, config, embed=embed, background=False)


def prepared(partition: str, words: Sequence[int], pictures: Sequence[int] = ()) -> Prepared:
    """Twenty tokens that all prompts share, a picture among them if there is one, and the words."""
    text = " ".join(WORDS[word] for word in words)
    media = tuple(PICTURES[number] for number in pictures)
    spans = tuple(MediumSpan(2 + 4 * place, 3, item.digest) for place, item in enumerate(media))
    tokens = (*[7] * 20, *(10 + word for word in words))
    return Prepared(Request("r", text, text, media, partition), tokens, spans)


def computed(asked: Prepared, epoch: str) -> Completion:
    """What an engine would have computed: rows of state with the tenant's mark."""
    shape = (2, 2, 1, len(asked.token_ids), 2)
    state = Tensor(np.full(shape, mark(asked.request.partition, epoch), np.float32), "F32")
    return Completion("t", (1,), len(asked.token_ids), len(asked.token_ids), capture=lambda: state)


@dataclass
class Tenants:
    """Asks and stores for many tenants. `crossed` says what was seen of another; it must stay empty."""

    cache: HierarchicalCache
    crossed: list[str] = field(default_factory=list[str])
    probes: int = 0
    found: int = 0
    bodies: int = 0

    def ask(self, partition: str, epoch: str, words: Sequence[int], pictures: Sequence[int], *, keep: bool) -> None:
        """One request: looked up, planned, its donors read, and stored if it is to be kept."""
        asked = replace(prepared(partition, words, pictures), epoch=epoch)
        decision = self.cache.find(asked)
        found = decision.found
        self.probes += 1
        digests = [span.digest for span in asked.spans]
        prefix = found.prefix[1] if found.prefix else None
        for donor in (*found.donors, *([prefix] if prefix else [])):
            self.found += 1
            self._check_owner(donor, partition, epoch)
        if self.cache.config.media == "exact":
            for donor in found.donors:
                if [span.digest for span in donor.spans] != digests:
                    self.crossed.append(f"a donor of other pictures: {donor.id}")
        if found.prefix and found.prefix[0].tokens > 2 and [s.digest for s in found.prefix[1].spans] != digests:
            self.crossed.append(f"a prefix over other pictures: {found.prefix}")
        read = {donor.id: donor for donor in (*decision.plan.donors, *([prefix] if prefix else []))}
        for donor in read.values():
            self._read(donor, partition, epoch)
        if keep:
            self._store(asked, decision, epoch)

    def clear(self, partition: str) -> None:
        """Clears a tenant: all of it goes, and nobody else's figures change."""
        store = self.cache.store
        others = [name for name in {meta.partition for meta in store.metas()} if name != partition]
        before = {name: (self.cache.stats(name), store.stats(name)) for name in others}
        own = store.stats(partition).entries
        if self.cache.clear(partition) != own:
            self.crossed.append(f"clearing {partition[:20]!r} removed another number than it had")
        if store.stats(partition).entries or list(store.metas(partition)):
            self.crossed.append(f"clearing {partition[:20]!r} left something")
        for name, figures in before.items():
            if (self.cache.stats(name), store.stats(name)) != figures:
                self.crossed.append(f"clearing {partition[:20]!r} changed the figures of {name[:20]!r}")

    def look_around(self, partition: str, epoch: str) -> None:
        """What a tenant's own listing shows is its own."""
        for meta in self.cache.store.metas(partition):
            self._check_owner(meta, partition, meta.epoch)
        for meta in self.cache.store.metas(partition, epoch):
            self._check_owner(meta, partition, epoch)

    def _check_owner(self, meta: ChunkMeta, partition: str, epoch: str) -> None:
        if (meta.partition, meta.epoch) != (partition, epoch):
            self.crossed.append(f"{meta.partition[:20]!r} {meta.epoch!r} for {partition[:20]!r} {epoch!r}")

    def _read(self, donor: ChunkMeta, partition: str, epoch: str) -> None:
        chunk = self.cache.store.get(donor.id)
        if chunk is not None:
            self.bodies += 1
            if not np.all(chunk.tensor.data == mark(partition, epoch)):
                self.crossed.append(f"state of another in {donor.id} for {partition[:20]!r}")

    def _store(self, asked: Prepared, decision: Decision, epoch: str) -> None:
        exact = decision.exact if decision.plan.approximate else decision.plan
        self.cache.keep(asked, decision, exact, computed(asked, epoch))


def wander(tenants: Tenants, rng: random.Random, probes: int) -> None:
    """So many random requests, now and then a clearing or a look around."""
    for _ in range(probes):
        partition, epoch = rng.choice(PARTITIONS), rng.choice(EPOCHS)
        words = [rng.randrange(len(WORDS)) for _ in range(rng.randrange(2, 5))]
        pictures = rng.sample(range(len(PICTURES)), rng.choice([0, 0, 1, 2]))
        tenants.ask(partition, epoch, words, pictures, keep=rng.random() < 0.5)
        if rng.random() < 0.004:
            tenants.clear(partition)
        if rng.random() < 0.004:
            tenants.look_around(partition, epoch)
