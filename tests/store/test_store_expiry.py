"""Expiry beyond the suite of stores: clocks that jump, the thread that removes, and traces on disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import until
from tests.store.test_store_purge_traces import traces

from dejakv.store import open_store
from dejakv.store.age import SKEW, SteadyClock, is_older, now
from dejakv.store.base import Chunk
from dejakv.store.disk import DiskStore
from dejakv.store.expiry import ExpiringStore, shortest
from dejakv.store.memory import MemoryStore
from dejakv.testing import make_chunk
from dejakv.testing.expiry import Ahead
from dejakv.testing.prompts import PREAMBLE, ids, prompt_chunk

SECRET = (*PREAMBLE, *range(70_000, 70_030))


@given(
    jumps=st.lists(st.tuples(st.floats(0, 100), st.floats(-1e6, 1e6)), max_size=20),
)
def test_the_clock_never_goes_back_and_never_stands(jumps: list[tuple[float, float]]) -> None:
    wall, elapsed = [1e9], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    last = clock()
    for seconds, jump in jumps:
        elapsed[0] += seconds
        wall[0] += seconds + jump
        assert clock() >= last + seconds - 1e-5
        assert clock() >= wall[0]
        last = clock()


def test_ages_that_are_not_known_are_high() -> None:
    assert [is_older(100.0, 10.0, at) for at in (100.0, 109.9, 110.0, 1e9)] == [False, False, True, True]
    assert not is_older(100.0, 10.0, 100.0 - SKEW)
    assert is_older(100.0, 10.0, 99.0 - SKEW)


def test_the_shortest_of_limits() -> None:
    assert (shortest(0, None), shortest(5, 0, None), shortest(5, 3.5)) == (0.0, 5, 3.5)


def test_a_thread_removes_what_has_expired_and_its_traces(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put(prompt_chunk(SECRET, created=now(), ttl=3, answer="a secret answer"))
    assert traces(tmp_path)
    until(lambda: not traces(tmp_path))
    store.close()


def test_what_expired_while_nobody_had_the_folder_open_leaves_when_it_is_opened(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    created = now()
    assert store.put(prompt_chunk(SECRET, created=created, ttl=3, answer="a secret answer"))
    store.close()
    until(lambda: is_older(created, 4, now()))
    again = open_store(tmp_path)
    assert list(again.metas()) == []  # as every cache does when it opens a store
    until(lambda: not traces(tmp_path))
    again.close()


def test_a_store_that_nobody_lists_looks_by_itself(tmp_path: Path) -> None:
    clock = Ahead()
    first = DiskStore(tmp_path)
    assert first.put(make_chunk(1, created=now(), ttl=60.0))
    clock.seconds = 61
    second = ExpiringStore(DiskStore(tmp_path), clock, background=False, look_first=True)
    assert second.sweep() == 1
    assert first.meta(make_chunk(1).meta.id) is None
    first.close()
    second.close()


def test_entries_of_processes_that_died_are_looked_for_now_and_then(tmp_path: Path) -> None:
    clock = Ahead()
    store = ExpiringStore(DiskStore(tmp_path), clock, background=False)
    other = DiskStore(tmp_path)
    assert other.put(make_chunk(1, created=now(), ttl=60.0))
    clock.seconds = 61
    assert store.sweep() == 0
    clock.seconds = 3700
    assert store.sweep() == 1
    store.close()
    other.close()


def test_an_entry_that_cannot_be_removed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, below = Ahead(), MemoryStore()
    store = ExpiringStore(below, clock, background=False)
    assert store.put(make_chunk(1, created=now(), ttl=60.0))
    clock.seconds = 61
    with monkeypatch.context() as patched:
        patched.setattr(below, "delete", lambda id: False)
        assert store.sweep() == 0
    assert ids(store) == set()
    clock.seconds = 130
    assert store.sweep() == 1


def test_what_leaves_before_its_time_takes_no_memory() -> None:
    store = ExpiringStore(MemoryStore(max_entries=4), background=False)
    for number in range(500):
        assert store.put(make_chunk(number, ttl=3600.0))
    assert len(store._known) == 4
    assert len(store._due) < 100
    assert store.delete(make_chunk(499).meta.id)
    other = make_chunk(partition="other", ttl=3600.0)
    store.put(other)
    assert store.clear("p") == 3
    assert set(store._known) == {other.meta.id}


@pytest.mark.parametrize("heard", ["before", "after"])
def test_an_entry_that_is_stored_again_while_it_is_deleted_expires_like_any_other(heard: str) -> None:
    """Another thread stores it before or after the expiring store hears of the removal, and in any case within `delete`."""
    clock, below = Ahead(), MemoryStore()
    chunk = make_chunk(1, created=now(), ttl=60.0)
    waiting: list[Chunk] = []

    def again(_: str) -> None:
        while waiting:
            assert store.put(waiting.pop())

    if heard == "before":
        below.on_evict(again)
    store = ExpiringStore(below, clock, background=False)
    if heard == "after":
        below.on_evict(again)
    assert store.put(chunk)
    waiting.append(chunk)
    assert store.delete(chunk.meta.id)
    assert below.meta(chunk.meta.id) is not None
    clock.seconds = 61
    assert store.sweep() == 1
    assert below.meta(chunk.meta.id) is None
