"""Reads from a service have a deadline, are measured, and are made once for all who wait."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.documents import EXACT, request, uncached, wordings
from tests.services import wait_until

from dejakv.cache import HierarchicalCache
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.base import LATE
from dejakv.pipeline import Pipeline
from dejakv.prototypes.fusion import FusionCache, FusionState
from dejakv.store import Store
from dejakv.store.objects import Bytes, MemoryObjects, ObjectMissing
from dejakv.store.remote.health import AT_ONCE, LinkTiming
from dejakv.store.remote.tiers import TieredObjects
from dejakv.testing.stored_states import check_whole, make_prompt_state

LONG = range(600)


class Far(MemoryObjects):
    """A service that answers reads, and removes, when it is told to."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.link = LinkTiming()
        self.answers, self.removing, self.removes = threading.Event(), threading.Event(), threading.Event()
        self.writing, self.writes = threading.Event(), threading.Event()
        self.writes.set()
        self.asked: list[str] = []
        self.heads: list[str] = []

    def get(self, name: str) -> Bytes:
        self.asked.append(name)
        assert self.answers.wait(60)
        return super().get(name)

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        self.writing.set()
        assert self.writes.wait(60)
        return super().put(name, parts)

    def delete(self, names: Sequence[str]) -> None:
        self.removing.set()
        assert self.removes.wait(10)
        super().delete(names)

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        self.heads.append(name)
        found = super().get(name)
        return found[:size].tobytes(), found.size


@pytest.fixture
def far() -> Iterator[Far]:
    objects = Far()
    yield objects
    objects.answers.set()
    objects.writes.set()
    objects.removes.set()


def opened(far: Far, memory_bytes: int = 0) -> Any:
    return closing(Store(TieredObjects(far, memory_bytes, "read"), background=False))


def test_a_read_is_given_up_at_its_deadline_and_serves_the_next(far: Far) -> None:
    stored_state = make_prompt_state(LONG)
    with opened(far, 1 << 24) as store:
        assert store.put(stored_state)
        assert store.remote_read_seconds(stored_state.meta.id) > 0
        for _ in range(3):
            assert store.get(stored_state.meta.id, time.monotonic()) is None
        assert len(far.asked) == len(set(far.asked)) == 3, "each segment once, all at the same time"
        stats = store.stats("p")
        assert (stats.late, stats.misses, stats.hits, stats.corrupt, stats.entries) == (3, 3, 0, 0, 1)
        far.answers.set()
        wait_until(lambda: store.remote_read_seconds(stored_state.meta.id) == 0, "the copies in memory")
        check_whole(store, [stored_state])
        assert len(far.asked) == 3


def test_copies_that_leave_for_what_is_read_beside_them_are_not_read_again(far: Far) -> None:
    stored_state = make_prompt_state(LONG)
    far.answers.set()
    with opened(far, stored_state.tensor.nbytes * 3 // 4) as store:  # room for one segment of three
        assert store.put(stored_state)
        for _ in range(2):
            far.asked.clear()
            assert store.get(stored_state.meta.id) is not None
            assert len(far.asked) == len(set(far.asked))


def test_what_was_removed_between_finding_and_reading_is_missing(far: Far) -> None:
    """A segment that the catalog has no size of any more is not read."""
    with closing(TieredObjects(far, 0, "read")) as tiers, pytest.raises(ObjectMissing):
        tiers.fetch({}, None)("removed")


def test_a_put_asks_for_nothing_while_lookups_wait_for_it(far: Far) -> None:
    """A catalog in memory has one connection."""
    with opened(far) as store:
        assert store.put(make_prompt_state(LONG))
    assert not far.heads


def test_lookups_do_not_wait_while_rows_that_prompts_share_are_stored_anew(far: Far) -> None:
    whole, part = make_prompt_state(LONG), make_prompt_state([*LONG[:100], 1, 2, 3])
    far.answers.set()
    far.removes.set()
    with opened(far) as store, ThreadPoolExecutor(2) as threads:
        assert store.put(whole)
        assert store.put(part)
        far.writing.clear()
        far.writes.clear()
        removal = threads.submit(store.delete, whole.meta.id)
        try:
            assert far.writing.wait(60)
            lookup = threads.submit(store.meta, part.meta.id)
            assert lookup.result(30) is not None
        finally:
            far.writes.set()
        assert removal.result(60)
        assert store.meta(whole.meta.id) is None
        check_whole(store, [part])
        assert len(list(far.list())) == store.stats().entries + 2, "its description, and what it shared alone"


def test_a_request_does_not_wait_for_a_removal(far: Far) -> None:
    stored_state = make_prompt_state(LONG)
    far.answers.set()
    with closing(Store(TieredObjects(far, 0, "read"))) as store:
        assert store.put(stored_state)
        MemoryObjects.delete(far, list(far.list()))  # by another machine
        assert store.get(stored_state.meta.id) is None
        assert far.removing.wait(60)
        far.removes.set()


def test_a_link_is_estimated_from_its_reads() -> None:
    now = [0.0]
    link = LinkTiming(lambda: now[0])
    assert 0 < link.seconds(1, 1 << 30) < 0.01, "unknown: it is tried, with a deadline"
    link.read(1, 10, 0.01)
    for _ in range(3):
        link.read(AT_ONCE + 1, 1 << 20, 0.02 + 1.0)
    assert link.seconds(1, 1 << 20) == pytest.approx(1.01)
    link.read(1, 1 << 20, 60.0)
    assert link.seconds(1, 1 << 20) == pytest.approx(1.01), "one slow read changes nothing"
    for _ in range(5):
        link.read(1, 10, 0.5)
    assert link.seconds(1, 0) == 0.5
    now[0] = 21.0
    assert 0 < link.seconds(1, 1 << 30) < 0.01, "it is tried again, whether trips or bytes were slow"
    link.read(1, 10, 0.01)
    assert link.seconds(1, 10) == 0.01


@pytest.mark.parametrize("asked", ["equal", "longer", "copied"])
def test_state_that_comes_too_late_is_computed(far: Far, docs_engine: Any, asked: str) -> None:
    """The same answer, and a counted miss; where reading is known to take longer, nothing is asked."""
    first = request(wordings()[0])
    wanted = replace(first if asked == "equal" else request(wordings()[1]), no_store=True)
    truth = uncached(docs_engine, wanted)
    config = replace(EXACT, costs=(1e-3, 0.0, 0.0, 0.0))
    if asked == "copied":
        config = replace(config, reuse="blend", semantic_text=False, exact_prefix=False)
    with opened(far) as store:
        cache = HierarchicalCache(store, [ExactTextCache()], config=config)
        pipeline = Pipeline(docs_engine, cache)
        pipeline.answer(first)
        cache.flush()
        late = pipeline.answer(wanted)
        assert (late.record.method, late.record.reason, late.token_ids) == ("none", LATE, truth.token_ids)
        assert store.stats().late == 1
        known = len(far.asked)
        far.link.read(1, 10, 3600.0)
        again = pipeline.answer(wanted)
        assert (again.record.method, again.token_ids) == ("none", truth.token_ids)
        assert (len(far.asked), store.stats().late) == (known, 1), "not asked"
        store._remote._link = LinkTiming()
        far.answers.set()
        hit = pipeline.answer(wanted)
        assert hit.record.method == {"equal": "exact", "longer": "prefix", "copied": "blend"}[asked]
        assert hit.token_ids == truth.token_ids


def test_encoder_and_fusion_outputs_have_deadlines(far: Far) -> None:
    """The time that the encoder took, and the time that the plan gains."""
    output = np.ones((4, 8), np.float32)
    states = FusionState("c", {"fusion_output": output})
    with opened(far) as store, VisualKVCache(disk=store) as cache:
        cache.view("an encoder").store("ab" * 32, "image", output, encoder_seconds=0.05)
        cache.flush()
        fusion = FusionCache(None, store, "model")
        assert fusion.save(states)
        with VisualKVCache(disk=store) as other:
            assert other.view("an encoder").lookup("ab" * 32) is None
            store._remote._link = LinkTiming()
            assert fusion.load("c", 0.05) is None
            assert store.stats().late == 2
            known = len(far.asked)
            store._remote._link.read(1, 10, 3600.0)
            assert other.view("an encoder").lookup("ab" * 32) is None
            assert fusion.load("c", 0.05) is None
            assert (len(far.asked), store.stats().late, store.stats().corrupt) == (known, 2, 0), "not asked"
