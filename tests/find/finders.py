"""Finders over prompts of plain numbers, for tests: what is stored, what is asked, and a level that proposes what it is told."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dejakv.config import SemanticCacheConfig
from dejakv.decide.finder import DonorFinder
from dejakv.decide.levels.base import Match, Query, Search
from dejakv.engines.base import Prepared
from dejakv.identity import exact_key
from dejakv.request import Request
from dejakv.store.base import ChunkMeta, StoredState, Tensor
from dejakv.store.open import open_store
from dejakv.store.store import Store


class Likes:
    """A level that finds the donors it is told, with their scores."""

    name = "semantic_text"
    status_names = ("semantic_text",)

    def __init__(self, scores: dict[str, float], problem: Exception | None = None) -> None:
        self.scores = scores
        self.problem = problem
        self.asked = 0

    def search(self, query: Query) -> Search:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        matches = tuple(Match(donor, self.name, score) for donor, score in self.scores.items())
        return Search(matches, {self.name: "hit" if matches else "miss"})

    def add(self, donor: str, query: Query) -> None:
        """Knows its donors."""

    def remove(self, donor: str) -> None:
        """Knows its donors."""

    def __len__(self) -> int:
        return len(self.scores)


def prompt(tokens: tuple[int, ...], text: str = "what is it?", epoch: str = "e", partition: str = "p") -> Prepared:
    return Prepared(Request("r", text, text, partition=partition), tokens, epoch=epoch)


def like(other: int) -> tuple[int, ...]:
    """The tokens of `ASKED` but for every twentieth: alike, without a run that the index of copied text would find."""
    return tuple(1_000 * (other + 1) + token if token % 20 == other else token for token in range(100))


ASKED = prompt(tuple(range(100)))
SIMILAR = prompt(like(0), "what was it?")
PREFIXED = prompt((*range(64), *range(400, 440)), "what begins like it?")


class Busy(Store):
    """A store in which something happens right after it was listed, once."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] = lambda: None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        listed = list(super().metas(partition, epoch))
        then, self.then = self.then, lambda: None
        then()
        return iter(listed)


def finder_of(
    *stored: Prepared,
    level: Likes | None = None,
    guards: tuple[Any, ...] = (),
    store: Store | None = None,
    **settings: Any,
) -> DonorFinder:
    store = store or open_store()
    own = SemanticCacheConfig(**settings)
    made = DonorFinder(store, [level] if level is not None else [], guards, own)
    for item in stored:
        chunk = chunk_of(item)
        store.put(chunk)
        made.add(chunk.meta)
    return made


def chunk_of(item: Prepared, **described_as: Any) -> StoredState:
    meta = replace(described(item), **described_as)
    return StoredState(meta, Tensor(np.zeros((2, 1, 1, len(item.token_ids), 1), np.float32), "F32"))


def described(item: Prepared) -> ChunkMeta:
    request = item.request
    return ChunkMeta(id_of(item), request.partition, item.epoch, item.token_ids, request.prompt, request.chunk)


def id_of(item: Prepared) -> str:
    return exact_key(item.request.partition, item.epoch, item.token_ids, ())


def similar(score: float = 0.9) -> Likes:
    return Likes({id_of(SIMILAR): score})


WORDS = tuple(range(1000, 1400))


def copied(*parts: tuple[int, ...], text: str = "") -> Prepared:
    return prompt(tuple(token for part in parts for token in part), text or f"prompt of {len(parts)} parts")
