"""Finders over prompts of plain numbers, and copied text found the plain way, which the index is held against."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN, Ids, fingerprints
from dejakv.decide.copied.index import CopiedIndex
from dejakv.decide.copied.search import DonorCover, cover
from dejakv.decide.finder import DonorFinder
from dejakv.decide.levels.base import LevelSearch, Match, Query
from dejakv.engines.base import Prepared
from dejakv.identity import exact_key
from dejakv.request import Request
from dejakv.store.base import RawTensor, StateInfo, StoredState
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

    def search(self, query: Query) -> LevelSearch:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        matches = tuple(Match(donor, self.name, score) for donor, score in self.scores.items())
        return LevelSearch(matches, {self.name: "hit" if matches else "miss"})

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

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[StateInfo]:
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
        stored_state = state_of(item)
        store.put(stored_state)
        made.add(stored_state.meta)
    return made


def state_of(item: Prepared, **described_as: Any) -> StoredState:
    meta = replace(described(item), **described_as)
    return StoredState(meta, RawTensor(np.zeros((2, 1, 1, len(item.token_ids), 1), np.float32), "F32"))


def described(item: Prepared) -> StateInfo:
    request = item.request
    return StateInfo(id_of(item), request.partition, item.epoch, item.token_ids, request.prompt, request.chunk)


def id_of(item: Prepared) -> str:
    return exact_key(item.request.partition, item.epoch, item.token_ids, ())


def similar(score: float = 0.9) -> Likes:
    return Likes({id_of(SIMILAR): score})


WORDS = tuple(range(1000, 1400))


def copied(*parts: tuple[int, ...], text: str = "") -> Prepared:
    return prompt(tuple(token for part in parts for token in part), text or f"prompt of {len(parts)} parts")


Texts = Mapping[str, Ids]


def indexed(texts: Texts) -> CopiedIndex:
    index = CopiedIndex()
    for name, tokens in texts.items():
        index.add({name: fingerprints(tokens)})
    return index


def covered_by(target: Ids, texts: Texts) -> set[int]:
    """Places of the prompt in runs of at least `SHORTEST_FINDABLE_RUN` tokens that stand in a text: every window compared with every other."""
    least = SHORTEST_FINDABLE_RUN
    windows = {tuple(text[i : i + least].tolist()) for text in texts.values() for i in range(len(text) - least + 1)}
    return {
        place
        for start in range(len(target) - least + 1)
        if tuple(target[start : start + least].tolist()) in windows
        for place in range(start, start + least)
    }


def places(found: DonorCover) -> set[int]:
    return {place for run in found.runs for place in range(run.start, run.start + run.length)}


def checked(target: Ids, texts: Texts) -> DonorCover:
    """The cover by an index of these texts: its runs are equal text, none overlaps another."""
    found = cover(target, indexed(texts), texts.get)
    check_runs(target, texts, found)
    return found


def check_runs(target: Ids, texts: Texts, found: DonorCover) -> None:
    for run in found.runs:
        there = texts[run.donor][run.source : run.source + run.length]
        assert np.array_equal(target[run.start : run.start + run.length], there)
    ends: Sequence[int] = [0, *(run.start + run.length for run in found.runs)]
    assert all(run.start >= end for run, end in zip(found.runs, ends, strict=False))
    assert found.covered == len(places(found))
