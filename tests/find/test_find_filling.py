"""Indexes that are filled from a store in which entries come and go meanwhile."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.find.finders import WORDS, Busy, chunk_of, copied, finder_of, id_of, prompt

from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.filling import Filling
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import Ask
from dejakv.store.base import ROWS
from dejakv.store.open import open_store
from dejakv.testing.chunks import make_chunk
from dejakv.vectors.base import Vector

FIRST, SECOND = copied((1, 2, 3), WORDS[:100]), copied((4, 5), WORDS[100:200])
ASKED = copied((7, 8), WORDS[:100], (9,), WORDS[100:200])


def test_what_leaves_while_copied_text_is_first_indexed_does_not_stay_in_the_index() -> None:
    store = Busy()
    made = finder_of(FIRST, SECOND, store=store)
    store.on_evict(made.remove)
    store.then = lambda: store.delete(id_of(FIRST))
    made.find(ASKED, Ask("blend"))
    assert made.copied.index is not None
    assert (id_of(FIRST) in made.copied.index, id_of(SECOND) in made.copied.index) == (False, True)


def test_what_is_stored_while_copied_text_is_first_indexed_is_found() -> None:
    store = Busy()
    made = finder_of(FIRST, store=store)
    second = chunk_of(SECOND)

    def another() -> None:
        assert store.put(second)
        made.add(second.meta)

    store.then = another
    decision = made.find(ASKED, Ask("blend"))
    assert {meta.id for meta in decision.plan.donors} == {id_of(FIRST), id_of(SECOND)}


def test_what_leaves_while_a_cache_is_opened_is_in_no_level() -> None:
    store, level = Busy(), ExactTextCache()
    for item in (FIRST, SECOND):
        store.put(chunk_of(item))
    store.then = lambda: store.delete(id_of(FIRST))
    cache = HierarchicalCache(store, [level], config=SemanticCacheConfig(reuse="blend"))
    assert len(level) == 1
    assert cache.find(prompt(FIRST.token_ids), Ask("exact")).plan.method == "none"
    assert cache.finder.copied.index is not None
    assert len(cache.finder.copied.index) == 1


@given(events=st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=4), min_size=4, max_size=4))
def test_an_index_holds_what_the_store_holds_whatever_happens_while_it_is_filled(
    events: list[list[tuple[bool, int]]],
) -> None:
    """`events`: what others store (True) and remove before each of four chunks is added, and at the end."""
    store, index = open_store(), set[str]()
    filling = Filling(store)

    def gone(id: str) -> None:
        filling.left(id)
        index.discard(id)

    store.on_evict(gone)
    for number in range(3):
        assert store.put(make_chunk(number))

    def happen(those: Sequence[tuple[bool, int]]) -> None:
        for stored, number in those:
            chunk = make_chunk(number)
            if stored:
                assert store.put(chunk)
                index.add(chunk.meta.id)
            else:
                store.delete(chunk.meta.id)

    with filling.listed(index.discard) as metas:
        for meta, those in zip(metas, events[:3], strict=True):
            happen(those)
            index.add(meta.id)
        happen(events[3])
    assert index == {meta.id for meta in store.metas()}


class Lengths:
    """An encoder that counts how often it is asked."""

    dim = 2

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.asked = 0

    def encode(self, text: str) -> Vector:
        self.asked += 1
        return np.array([1.0, 0.0], np.float32)

    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        return [self.encode(text) for text in texts]


@pytest.mark.parametrize(("embedder", "again"), [("now", 1), ("before", 3), ("later", 4)])
def test_prompts_that_are_embedded_again_are_told_once(
    embedder: str, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, encoder = open_store(), Lengths(embedder)
    vectors = {"text": np.array([0.0, 1.0], np.float32)}
    for number, stored_by in enumerate(["now", "before", "now", "now"]):
        item = prompt((number, *range(100)), f"text {number}")
        assert store.put(chunk_of(item, embedder=stored_by, vectors=vectors))
    assert store.put(chunk_of(prompt((9, *range(50)), "no prompt"), embedder="a third", kind=ROWS))
    assert store.put(chunk_of(prompt((8, *range(50)), ""), embedder="a third"))
    with caplog.at_level(logging.WARNING):
        HierarchicalCache(store, [SemanticTextCache(encoder)], embedder=embedder)
    assert encoder.asked == again
    [line] = [record.getMessage() for record in caplog.records]
    assert f"{again} of 4 stored prompts" in line
    assert "index_encoder" in line


def test_nothing_is_told_where_vectors_fit_or_nothing_compares_them(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    assert store.put(chunk_of(FIRST, embedder="before"))
    HierarchicalCache(store, [SemanticTextCache(Lengths("before"))], embedder="before")
    HierarchicalCache(store, [ExactTextCache()], embedder="now")
    assert not caplog.records
