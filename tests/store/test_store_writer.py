"""The writer never blocks and never raises; what waits is found and read; what it could not do is counted."""

import gc
import re
import threading
import weakref
from typing import Any

import pytest
from tests.serving import until

from dejakv.store.base import StoredState, WriterStats
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stored_states import make_stored_state


class Gated(Store):
    """Writes nothing before `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.began = threading.Event(), threading.Event()

    def put(self, stored_state: StoredState) -> bool:
        self.began.set()
        assert self.opened.wait()
        return super().put(stored_state)


def submit(writer: Store, number: int, **more: Any) -> bool:
    stored_state = make_stored_state(number)
    return writer.submit(stored_state.meta, more.pop("capture", lambda: stored_state.tensor), **more)


def test_what_waits_is_found_and_read_and_copied_once() -> None:
    store = Gated()
    writer = store
    stored_state, copies = make_stored_state(1), list[int]()
    writer.submit(stored_state.meta, lambda: (copies.append(1), stored_state.tensor)[1])
    assert [meta.id for meta in writer.metas()] == [stored_state.meta.id]
    assert list(writer.metas("other")) == []
    for _ in range(2):
        found = writer.get(stored_state.meta.id)
        assert found is not None
        assert found.tensor.data.tobytes() == stored_state.tensor.data.tobytes()
    assert writer.stats().hits == 2
    assert writer.stats("other").hits == 0
    store.opened.set()
    writer.flush()
    assert len(copies) == 1
    assert len(list(writer.metas())) == store.stats().entries == 1
    writer.close()


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_is_removed_while_it_waits_or_is_written_is_not_stored(how: str) -> None:
    store = Gated()
    writer = store
    gone: list[str] = []
    writer.listen(removed=gone.append)
    ids = [make_stored_state(number).meta.id for number in range(2)]
    assert submit(writer, 0)
    assert submit(writer, 1)
    assert store.began.wait()
    if how == "delete":
        assert [writer.delete(id) for id in ids] == [True, True]
    else:
        assert writer.clear() == 2
    assert [writer.meta(id) for id in ids] == [None, None]
    assert set(gone) == set(ids)
    store.opened.set()
    writer.flush()
    assert store.stats().entries == 0
    assert writer.stats().submissions == WriterStats(submitted=2, dropped=2)
    writer.close()


def test_a_full_queue_drops_and_does_not_wait() -> None:
    store = Gated()
    writer = store
    assert submit(writer, 0)
    assert store.began.wait()
    assert [submit(writer, number) for number in range(1, 36)] == [True] * 32 + [False] * 3
    assert len(list(writer.metas())) == 33
    store.opened.set()
    writer.flush()
    assert writer.stats().submissions == WriterStats(submitted=36, stored=33, dropped=3)
    writer.close()


def test_errors_and_refusals_are_counted_and_leave() -> None:
    writer = open_store()
    gone: list[str] = []
    writer.listen(removed=gone.append)

    def fail(*_: object) -> Any:
        raise RuntimeError("no state")

    submit(writer, 0, capture=fail)
    submit(writer, 1, capture=lambda: None)
    submit(writer, 2, complete=lambda _: None)
    writer.flush()
    assert writer.stats().submissions == WriterStats(submitted=3, errors=1, empty=2)
    assert [writer.get(make_stored_state(number).meta.id) for number in range(3)] == [None] * 3
    assert len(gone) == 3
    writer.close()
    long = open_store(min_tokens=1000)
    assert not submit(long, 0, capture=fail)
    assert (long.stats().submissions, long.stats().refused) == (WriterStats(), {"too_short": 1})
    long.close()
    other = open_store()
    submit(other, 1, after=fail, background=False)
    assert other.stats().submissions == WriterStats(submitted=1, stored=1, errors=1)


def test_close_finishes_and_later_work_is_dropped() -> None:
    writer = open_store()
    for number in range(10):
        submit(writer, number)
    writer.close()
    writer.close()
    assert writer.stats().submissions.stored == 10
    assert submit(writer, 99) is False
    assert writer.stats().submissions.dropped == 1


def test_nothing_is_kept_alive_after_it_is_stored() -> None:
    class State:
        pass

    state = State()
    alive = weakref.ref(state)
    writer = open_store()
    submit(writer, 1, capture=lambda state=state: make_stored_state(1).tensor if state else None)
    del state
    writer.flush()
    until(lambda: gc.collect() >= 0 and alive() is None)
    writer.close()


@pytest.mark.parametrize(
    ("former", "new"), [("on_evict", "listen(removed=...)"), ("on_arrival", "listen(arrived=...)")]
)
def test_a_former_name_of_a_listener_warns_and_works(former: str, new: str) -> None:
    store, told = open_store(), list[str]()
    with pytest.warns(DeprecationWarning, match=re.escape(f"Store.{former} is now named Store.{new}")) as warned:
        getattr(store, former)(told.append)
    assert warned[0].filename == __file__
    (store._listeners if former == "on_evict" else store._arrivals).notify(["an id"])
    assert told == ["an id"]


def test_former_names_of_figures_warn_and_work() -> None:
    store = open_store()
    submit(store, 0, background=False)
    with pytest.warns(DeprecationWarning, match=r"Store\.outcomes is now named Store\.stats\(\)\.submissions"):
        assert store.outcomes == WriterStats(submitted=1, stored=1)
    with pytest.warns(DeprecationWarning, match=r"Store\.outage_seconds is now named"):
        assert store.outage_seconds() == {"bucket_away_seconds": 0.0, "feed_away_seconds": 0.0}
    with pytest.raises(AttributeError, match="'Store' object has no attribute 'outcome'"):
        store.outcome  # noqa: B018
