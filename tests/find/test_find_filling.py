"""Indexes that are filled from a store in which entries come and go meanwhile."""

import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.find.conftest import ASKED, SIMILAR, WORDS, Busy, Likes, copied, finder_of, id_of, prompt, state_of

from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.fingerprints import TextFingerprints
from dejakv.decide.copied.search import fingerprints_of
from dejakv.decide.finder import DonorFinder, space_of
from dejakv.decide.guards.base import ThresholdGuard
from dejakv.decide.levels.base import Query
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import Decision, ReuseRequest
from dejakv.request import Prepared
from dejakv.store.base import ROWS, StateInfo
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.vectors.base import Vector

FIRST, SECOND = copied((1, 2, 3), WORDS[:100]), copied((4, 5), WORDS[100:200])
BOTH = copied((7, 8), WORDS[:100], (9,), WORDS[100:200])


def donors(finder: DonorFinder, asked: Prepared = BOTH) -> set[str]:
    return {meta.id for meta in finder.decide(asked, ReuseRequest("blend")).plan.donors}


def test_what_leaves_while_copied_text_is_first_indexed_is_not_found() -> None:
    store = Busy()
    made = finder_of(FIRST, SECOND, store=store)
    store.listen(removed=made.remove)
    store.then = lambda: store.delete(id_of(FIRST))
    assert donors(made) == {id_of(SECOND)}
    assert len(made._copied) == 1, "nor does it take memory"  # pyright: ignore[reportPrivateUsage, reportArgumentType]


def test_what_is_stored_while_copied_text_is_first_indexed_is_found() -> None:
    store = Busy()
    made = finder_of(FIRST, store=store)
    second = state_of(SECOND)

    def another() -> None:
        assert store.put(second)
        made.add(second.meta)

    store.then = another
    assert donors(made) == {id_of(FIRST), id_of(SECOND)}


def test_what_is_stored_while_an_empty_index_is_asked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty index was taken for none, and replaced: the prompt went into the one that nobody asked any more."""
    made, first = finder_of(reuse="blend"), state_of(FIRST)

    def asked_meanwhile(metas: Sequence[StateInfo]) -> list[TextFingerprints]:
        assert donors(made) == set()
        return fingerprints_of(metas)

    monkeypatch.setattr("dejakv.decide.finder.fingerprints_of", asked_meanwhile)
    assert made.store.put(first)
    made.add(first.meta)
    assert donors(made) == {id_of(FIRST)}


def test_a_prompt_whose_copied_text_cannot_be_indexed_costs_its_own_hits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, level = open_store(), ExactTextCache()
    for item in (FIRST, SECOND):
        assert store.put(state_of(item))

    def broken(metas: Sequence[StateInfo]) -> list[TextFingerprints]:
        if any(meta.id == id_of(FIRST) for meta in metas):
            raise RuntimeError("the first cannot be read")
        return fingerprints_of(metas)

    monkeypatch.setattr("dejakv.decide.finder.fingerprints_of", broken)
    made = DonorFinder(store, [level], config=SemanticCacheConfig(reuse="blend"))
    with pytest.raises(RuntimeError, match="the first"):
        made.fill()
    assert donors(made) == {id_of(SECOND)}


def test_a_stored_prompt_is_hit_exactly_while_what_is_stored_is_indexed() -> None:
    store, item, found = Busy(), prompt(tuple(range(40)), "a question"), list[Decision]()
    store.put(state_of(item, space=space_of(item, "exact")))
    made = DonorFinder(store, [ExactTextCache()])
    store.then = lambda: found.append(made.decide(item, ReuseRequest()))
    made.fill()
    assert found[0].plan.method == "exact"
    assert found[0].statuses == made.decide(item, ReuseRequest()).statuses == {"exact_text": "hit", "kv_cache": "hit"}


def test_what_leaves_while_a_cache_is_opened_is_in_no_level() -> None:
    store, level = Busy(), ExactTextCache()
    for item in (FIRST, SECOND):
        store.put(state_of(item))
    store.then = lambda: store.delete(id_of(FIRST))
    cache = HierarchicalCache(store, [level], config=SemanticCacheConfig(reuse="blend"), background=False)
    assert len(level) == 1
    assert cache.find(prompt(FIRST.token_ids), ReuseRequest("exact")).plan.method == "none"
    assert donors(cache.finder) == {id_of(SECOND)}


class Steps(ExactTextCache):
    """A level in which something happens before each donor is added."""

    def __init__(self, events: Sequence[Sequence[tuple[bool, int]]]) -> None:
        super().__init__()
        self.events = list(events)
        self.store, self.finder = open_store(), DonorFinder(open_store())

    def encode(self, query: Query) -> None:
        if self.events:
            for stored, number in self.events.pop(0):
                stored_state = state_of(prompt((number, *range(40)), f"text {number}"))
                if not stored:
                    self.store.delete(stored_state.meta.id)
                elif self.store.put(stored_state):
                    self.finder.add(stored_state.meta)


@given(events=st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=4), max_size=4))
def test_a_level_holds_what_the_store_holds_whatever_happens_while_it_is_filled(
    events: list[list[tuple[bool, int]]],
) -> None:
    """`events`: what others store (True) and remove before each stored state is added."""
    store, level = open_store(), Steps(events)
    for number in range(3):
        assert store.put(state_of(prompt((number, *range(40)), f"text {number}")))
    level.store, level.finder = store, DonorFinder(store, [level])
    store.listen(removed=level.finder.remove)
    level.finder.fill()
    assert {id for number in range(6) for id in level.candidates(f"text {number}", "")} == {m.id for m in store.metas()}


class Slow(ExactTextCache):
    """A level whose encoder is held up while a cache is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, query: Query) -> None:
        if threading.current_thread().name == "dejakv-fill":
            self.begun.set()
            assert self.go_on.wait(60)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def opened(slow: Slow) -> HierarchicalCache:
    """A cache over stored prompts that is being filled."""
    store = open_store()
    for item in (FIRST, SECOND, SIMILAR, ASKED):
        assert store.put(state_of(item))
    cache = HierarchicalCache(store, [slow, Likes({id_of(SIMILAR): 0.9})], [ThresholdGuard({"semantic_text": 0.8})])
    assert slow.begun.wait(60)
    return cache


def test_no_request_waits_for_the_filling(slow: Slow, opened: HierarchicalCache) -> None:
    asked = prompt((*ASKED.token_ids[:-1], 5), SIMILAR.request.chunk)
    assert opened.find(ASKED, ReuseRequest("exact")).plan.reused == 99
    assert opened.find(asked, ReuseRequest("adopt")).statuses["exact_text"] == "miss"
    assert opened.find(BOTH, ReuseRequest("blend")).plan.method in ("none", "blend"), "as much as is indexed so far"
    slow.go_on.set()
    opened.flush()
    assert len(slow) == 4
    assert donors(opened.finder) == {id_of(FIRST), id_of(SECOND)}
    opened.close()


def test_a_cache_can_be_closed_while_it_is_filled(slow: Slow, opened: HierarchicalCache) -> None:
    closing = threading.Thread(target=opened.close)
    closing.start()
    slow.go_on.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_prompt_that_cannot_be_embedded_keeps_no_other_from_being_found(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(ExactTextCache):
        def encode(self, query: Query) -> None:
            if query.text == FIRST.request.chunk:
                raise RuntimeError("down")

    store, level = open_store(), Fails()
    for item in (FIRST, SIMILAR):
        assert store.put(state_of(item))
    cache = HierarchicalCache(store, [level])
    cache.flush()
    assert (len(level), "down" in caplog.text) == (1, True)
    with pytest.raises(RuntimeError, match="down"):
        HierarchicalCache(store, [Fails()], background=False)


def test_vectors_of_two_requests_are_computed_at_once() -> None:
    """No encoder works under the finder's lock: each of two waits until the other has begun."""
    both = threading.Barrier(2, timeout=60)

    class Meets(ExactTextCache):
        def encode(self, query: Query) -> None:
            both.wait()

    made = DonorFinder(open_store(), [Meets()])
    asking = [threading.Thread(target=made.decide, args=(prompt((n, 1, 2)), ReuseRequest("adopt"))) for n in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert not both.broken


def test_lookups_while_others_add_and_remove() -> None:
    """Stored states that stay are always found; those that come and go are found whole or not at all."""
    rng, failed, done = np.random.default_rng(0), list[BaseException](), threading.Event()
    items = [prompt(tuple(rng.integers(0, 49_152, 300).tolist()), f"text {number}") for number in range(60)]
    made = finder_of(*items, reuse="blend")
    made.levels = (ExactTextCache(),)
    passing = [state_of(item).meta for item in items[20:]]
    for meta in passing:
        made.remove(meta.id)

    def run(work: Sequence[object]) -> None:
        try:
            for _ in range(4):
                for meta in passing:
                    made.add(meta)
                for meta in passing:
                    made.remove(meta.id)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    def look() -> None:
        chance = np.random.default_rng(1)
        try:
            while not done.is_set():
                kept, other = items[chance.integers(0, 20)], items[chance.integers(20, 60)]
                found = made.decide(prompt((1, *kept.token_ids, *other.token_ids)), ReuseRequest("blend")).donor_search
                assert found.copied in (300, 600)
                assert id_of(kept) in [meta.id for meta in found.donors]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(passing,)), *(threading.Thread(target=look) for _ in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class Lengths:
    """An encoder that counts how often it is asked."""

    dim = 2

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.asked = 0

    def encode(self, text: str) -> Vector:
        self.asked += 1
        return np.array([1.0, 0.0], np.float32)


def opened_over(store: Store, level: ExactTextCache | SemanticTextCache, embedder: str) -> None:
    HierarchicalCache(store, [level], embedder=embedder, background=False)


@pytest.mark.parametrize(("embedder", "again"), [("now", 1), ("before", 3), ("later", 4)])
def test_prompts_that_are_embedded_again_are_told_once(
    embedder: str, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, encoder = open_store(), Lengths(embedder)
    vectors = {"text": np.array([0.0, 1.0], np.float32)}
    for number, stored_by in enumerate(["now", "before", "now", "now"]):
        item = prompt((number, *range(100)), f"text {number}")
        assert store.put(state_of(item, embedder=stored_by, vectors=vectors))
    assert store.put(state_of(prompt((9, *range(50)), "no prompt"), embedder="a third", kind=ROWS))
    assert store.put(state_of(prompt((8, *range(50)), ""), embedder="a third"))
    with caplog.at_level(logging.WARNING):
        opened_over(store, SemanticTextCache(encoder), embedder)
    assert encoder.asked == again
    [line] = [record.getMessage() for record in caplog.records]
    assert f"{again} of 4 stored prompts" in line
    assert "index_encoder" in line


def test_nothing_is_told_where_vectors_fit_or_nothing_compares_them(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    assert store.put(state_of(FIRST, embedder="before"))
    opened_over(store, SemanticTextCache(Lengths("before")), "before")
    opened_over(store, ExactTextCache(), "now")
    assert not caplog.records
