"""The writer never blocks, never raises, and counts what it could not do."""

import threading
import time

from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.memory import MemoryStore
from dejakv.store.writer import Writer, WriterStats
from dejakv.testing.chunks import make_chunk


def test_chunks_are_stored_behind_and_announced() -> None:
    store = MemoryStore()
    writer = Writer(store)
    stored: list[ChunkMeta] = []
    caller = threading.get_ident()
    threads: set[int] = set()

    def make(number: int) -> Chunk:
        threads.add(threading.get_ident())
        return make_chunk(number)

    for number in range(5):
        assert writer.submit(lambda number=number: make(number), after=stored.append)
    writer.flush()
    assert [meta.token_ids[0] for meta in stored] == list(range(5))
    assert all(meta.nbytes > 0 for meta in stored)
    assert store.stats().entries == 5
    assert caller not in threads
    assert writer.stats() == WriterStats(submitted=5, stored=5)
    writer.close()


def test_a_full_queue_drops_and_does_not_wait() -> None:
    store, gate, started = MemoryStore(), threading.Event(), threading.Event()
    writer = Writer(store, max_queue=2)

    def slow() -> Chunk:
        started.set()
        gate.wait()
        return make_chunk(0)

    assert writer.submit(slow)
    started.wait()
    accepted = [writer.submit(lambda number=number: make_chunk(number)) for number in range(1, 6)]
    assert accepted == [True, True, False, False, False]
    gate.set()
    writer.flush()
    assert writer.stats() == WriterStats(submitted=6, stored=3, dropped=3)
    writer.close()


def test_errors_and_refusals_are_counted() -> None:
    writer = Writer(AdmittingStore(MemoryStore(), Admission(min_tokens=1000)))

    def fail() -> Chunk:
        raise RuntimeError("no state")

    def fail_after(_: ChunkMeta) -> None:
        raise RuntimeError("index")

    writer.submit(fail)
    writer.submit(lambda: None)
    writer.submit(lambda: make_chunk(1))
    writer.close()
    assert writer.stats() == WriterStats(submitted=3, errors=1, empty=1, refused=1)
    other = Writer(MemoryStore(), background=False)
    other.submit(lambda: make_chunk(1), after=fail_after)
    assert other.stats() == WriterStats(submitted=1, stored=1, errors=1)


def test_without_a_thread_the_work_is_done_at_once() -> None:
    store = MemoryStore()
    writer = Writer(store, background=False)
    before = threading.active_count()
    assert writer.submit(lambda: make_chunk(1))
    assert store.stats().entries == 1
    assert threading.active_count() == before
    writer.flush()
    writer.close()


def test_close_finishes_and_later_work_is_dropped() -> None:
    store = MemoryStore()
    writer = Writer(store)
    for number in range(10):
        writer.submit(lambda number=number: make_chunk(number))
    writer.close()
    writer.close()
    assert store.stats().entries == 10
    assert writer.submit(lambda: make_chunk(99)) is False
    assert writer.stats().dropped == 1


def test_nothing_is_kept_alive_after_it_is_stored() -> None:
    import gc
    import weakref

    class State:
        pass

    state = State()
    alive = weakref.ref(state)
    writer = Writer(MemoryStore())
    writer.submit(lambda state=state: make_chunk(1) if state else None)
    del state
    writer.flush()
    while alive() is not None:
        gc.collect()
        time.sleep(0.01)
    writer.close()
