"""The writer never blocks and never raises; what waits is found and read; what it could not do is counted."""

import gc
import threading
import weakref
from typing import Any

import pytest
from tests.serving import until

from dejakv.store.background import WriterStats
from dejakv.store.base import StoredState
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.chunks import make_chunk


class Gated(Store):
    """Writes nothing before `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.began = threading.Event(), threading.Event()

    def put(self, chunk: StoredState) -> bool:
        self.began.set()
        assert self.opened.wait()
        return super().put(chunk)


def submit(writer: Store, number: int, **more: Any) -> bool:
    chunk = make_chunk(number)
    return writer.submit(chunk.meta, more.pop("capture", lambda: chunk.tensor), **more)


def test_what_waits_is_found_and_read_and_copied_once() -> None:
    store = Gated()
    writer = store
    chunk, copies = make_chunk(1), list[int]()
    writer.submit(chunk.meta, lambda: (copies.append(1), chunk.tensor)[1])
    assert [meta.id for meta in writer.metas()] == [chunk.meta.id]
    assert list(writer.metas("other")) == []
    for _ in range(2):
        found = writer.get(chunk.meta.id)
        assert found is not None
        assert found.tensor.data.tobytes() == chunk.tensor.data.tobytes()
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
    writer.on_evict(gone.append)
    ids = [make_chunk(number).meta.id for number in range(2)]
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
    assert writer.outcomes == WriterStats(submitted=2, dropped=2)
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
    assert writer.outcomes == WriterStats(submitted=36, stored=33, dropped=3)
    writer.close()


def test_errors_and_refusals_are_counted_and_leave() -> None:
    writer = open_store()
    gone: list[str] = []
    writer.on_evict(gone.append)

    def fail(*_: object) -> Any:
        raise RuntimeError("no state")

    submit(writer, 0, capture=fail)
    submit(writer, 1, capture=lambda: None)
    submit(writer, 2, complete=lambda _: None)
    writer.flush()
    assert writer.outcomes == WriterStats(submitted=3, errors=1, empty=2)
    assert [writer.get(make_chunk(number).meta.id) for number in range(3)] == [None] * 3
    assert len(gone) == 3
    writer.close()
    long = open_store(min_tokens=1000)
    assert not submit(long, 0, capture=fail)
    assert (long.outcomes, long.stats().refused) == (WriterStats(), {"too_short": 1})
    long.close()
    other = open_store()
    submit(other, 1, after=fail, background=False)
    assert other.outcomes == WriterStats(submitted=1, stored=1, errors=1)


def test_close_finishes_and_later_work_is_dropped() -> None:
    writer = open_store()
    for number in range(10):
        submit(writer, number)
    writer.close()
    writer.close()
    assert writer.outcomes.stored == 10
    assert submit(writer, 99) is False
    assert writer.outcomes.dropped == 1


def test_nothing_is_kept_alive_after_it_is_stored() -> None:
    class State:
        pass

    state = State()
    alive = weakref.ref(state)
    writer = open_store()
    submit(writer, 1, capture=lambda state=state: make_chunk(1).tensor if state else None)
    del state
    writer.flush()
    until(lambda: gc.collect() >= 0 and alive() is None)
    writer.close()
