"""SQLite's locks of a process stay whole, over openings by other processes and over forks; reading waits for nobody, and finds nothing that others
removed."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dejakv.store import changes
from dejakv.store.base import KV
from dejakv.store.catalog import Catalog
from dejakv.store.open import open_store
from dejakv.store.prefix_keys import SIZE
from dejakv.store.segment import Segment
from dejakv.testing import make_stored_state

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

VISIT = (
    "import sys; from dejakv.store import open_store; s = open_store(sys.argv[1]); print(s.stats().entries); s.close()"
)


def visited(folder: Path) -> int:
    """Opens and closes the folder in another process; the entries it saw."""
    done = subprocess.run([sys.executable, "-c", VISIT, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def in_child(body: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # a child that nobody waits for any more ends
        code = 1
        try:
            code = 0 if body() else 2
        finally:
            os._exit(code)
    return child


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def log_is_there(folder: Path) -> bool:
    return (folder / "catalog.sqlite-wal").exists()


def test_a_visitor_leaves_the_log_to_those_who_use_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(1))
    assert store.get(make_stored_state(1).meta.id) is not None
    assert visited(tmp_path / "store") == 1
    assert log_is_there(tmp_path / "store")
    assert store.put(make_stored_state(2))
    assert visited(tmp_path / "store") == 2
    store.close()
    assert visited(tmp_path / "store") == 2


def test_a_second_store_of_this_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    first, second = open_store(tmp_path / "store"), open_store(tmp_path / "store")
    assert first.put(make_stored_state(1))
    second.close()
    open_store(tmp_path / "store").close()
    assert visited(tmp_path / "store") == 1
    assert log_is_there(tmp_path / "store")
    assert first.put(make_stored_state(2))
    assert visited(tmp_path / "store") == 2
    first.close()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_forked_child_keeps_the_log_when_its_parent_closes(tmp_path: Path, end: str) -> None:
    """A child has none of its parent's locks: it must take its own, or the parent deletes the log under it."""
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(0))
    assert store.get(make_stored_state(0).meta.id) is not None
    ready, go = os.pipe(), os.pipe()

    def body() -> bool:
        good = store.put(make_stored_state(1)) and store.get(make_stored_state(0).meta.id) is not None
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        good = good and store.put(make_stored_state(2))
        os.write(ready[1], b"2")
        if end == "kill":
            time.sleep(60)
        return good

    child = in_child(body)
    assert os.read(ready[0], 1) == b"1"
    store.close()
    assert visited(tmp_path / "store") == 2
    assert log_is_there(tmp_path / "store")
    os.write(go[1], b"1")
    assert os.read(ready[0], 1) == b"2"
    if end == "kill":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        assert ended_well(child)
    for descriptor in (*ready, *go):
        os.close(descriptor)
    assert visited(tmp_path / "store") == 3


def test_a_parent_keeps_the_log_when_its_child_ends(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(0))
    assert ended_well(in_child(lambda: store.put(make_stored_state(1))))
    assert ended_well(in_child(lambda: store.close() is None))
    assert store.put(make_stored_state(2))
    assert visited(tmp_path / "store") == 3
    assert log_is_there(tmp_path / "store")
    assert store.put(make_stored_state(3))
    store.close()
    assert visited(tmp_path / "store") == 4


def test_a_fork_beside_threads_that_write(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    stop = threading.Event()
    failed: list[int] = []

    def work(offset: int) -> None:
        number = offset
        while not stop.is_set():
            if not store.put(make_stored_state(number)):
                failed.append(number)
            store.get(make_stored_state(number).meta.id)
            number += 2

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0)  # what other threads held stays locked in a child, so it only ends
            assert ended_well(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []
    held = store.stats().entries
    assert len(list(store.metas())) == held == visited(tmp_path / "store")
    store.close()


@contextmanager
def somebody_writes(folder: Path) -> Iterator[None]:
    """Holds the catalog's write lock, as another process's transaction does."""
    with closing(sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_reading_writes_nothing_while_somebody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these could wait ten seconds for the lock: uses to be noted, a damaged file, a damaged row."""
    monkeypatch.setattr(changes, "_MAX_USES", 2)
    store = open_store(tmp_path / "store")
    stored_states = [make_stored_state(number, nbytes=64) for number in range(5)]
    for stored_state in stored_states:
        assert store.put(stored_state)
    bad_file = next(
        path
        for path in ((tmp_path / "store") / "segments").glob("*/*")
        if stored_states[1].meta.id.encode() in path.read_bytes()
    )
    bad_file.write_bytes(b"damaged")
    with closing(sqlite3.connect((tmp_path / "store") / "catalog.sqlite")) as connection:
        connection.execute("UPDATE records SET about = x'00' WHERE id = ?", (stored_states[2].meta.id,))
        connection.commit()
    again = open_store(tmp_path / "store")
    gone: list[str] = []
    again.listen(removed=gone.append)
    refused = threading.Event()
    with somebody_writes(tmp_path / "store"):
        writer = threading.Thread(target=lambda: again.put(make_stored_state(9)) or refused.set())
        writer.start()
        for _ in range(300):
            assert again.get(stored_states[0].meta.id) is not None
            assert again.get(stored_states[3].meta.id) is not None
        for _ in range(3):
            assert again.get(stored_states[1].meta.id) is None
            assert again.get(stored_states[2].meta.id) is None
            assert again.meta(stored_states[1].meta.id) is None
        assert {meta.id for meta in again.metas()} >= {stored_states[number].meta.id for number in (0, 3, 4)}
        assert again.stats().corrupt == 2
        assert not refused.is_set(), "reading took as long as a writer waits"
        writer.join()
    assert refused.is_set()
    assert again.stats("p").refused == {"busy": 1}
    again.flush()
    assert sorted(gone) == sorted(stored_states[number].meta.id for number in (1, 2))
    assert again.stats().entries == 3
    assert again.put(stored_states[1])
    assert again.get(stored_states[1].meta.id) is not None
    again.close()
    store.close()
    # The 300 uses were kept back, not lost.
    with closing(sqlite3.connect((tmp_path / "store") / "catalog.sqlite")) as connection:
        (hits,) = connection.execute("SELECT hits FROM records WHERE id = ?", (stored_states[0].meta.id,)).fetchone()
    assert hits == 300


def test_a_closed_store_finds_and_takes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_stored_state(0))
    store.close()
    store.close()
    assert store.get(make_stored_state(0).meta.id) is None
    assert store.put(make_stored_state(1)) is False
    assert list(store.metas()) == []
    assert visited(tmp_path / "store") == 1


def test_the_log_stays_short_where_much_is_indexed_at_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    (path := tmp_path / "catalog.sqlite").touch()
    with closing(Catalog(path)) as catalog:
        for _ in range(12):
            with catalog.transaction() as sql:
                for _ in range(300):
                    keys = tuple(rng.randbytes(SIZE) for _ in range(16))
                    changes.add_segment(sql, Segment(rng.randbytes(16).hex(), "p", "e", KV, 0, 256, keys=keys))
        assert tmp_path.joinpath("catalog.sqlite-wal").stat().st_size < path.stat().st_size


@pytest.mark.parametrize("entries", [3, 300])
def test_what_another_process_clears_is_not_served_from_memory(
    tmp_path: Path, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when more was cleared than the journal names."""
    monkeypatch.setattr(changes, "_JOURNAL_ROWS", 100)
    one = open_store(tmp_path / "store", memory_bytes=1 << 24)
    told: list[str] = []
    one.listen(removed=told.append)
    mine = [make_stored_state(number, nbytes=64, partition="a") for number in range(entries)]
    kept = make_stored_state(0, nbytes=64, partition="b")
    for stored_state in (*mine, kept):
        assert one.put(stored_state)
        assert one.get(stored_state.meta.id) is not None
    two = open_store(tmp_path / "store")
    assert two.clear("a") == entries
    assert one.get(mine[0].meta.id) is None
    assert one.meta(mine[1].meta.id) is None
    assert [meta.id for meta in one.metas()] == [kept.meta.id]
    assert one.get(kept.meta.id) is not None
    assert set(told) <= {stored_state.meta.id for stored_state in mine}
    assert entries > 3 or len(set(told)) == entries, "all that the journal names"
    two.close()
    one.close()
