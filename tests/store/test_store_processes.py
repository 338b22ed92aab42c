"""Two processes on one folder, and processes that are killed while they write."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dejakv.store import changes, open_store
from dejakv.testing.chunks import make_chunk, same_bits

HAMMER = """
import sys
from dejakv.store import open_store
from dejakv.testing.chunks import make_chunk, same_bits
folder, offset = sys.argv[1], int(sys.argv[2])
store = open_store(folder, max_entries=10)
wrong = 0
print("ready", flush=True)
sys.stdin.readline()
for step in range(120):
    chunk = make_chunk((offset + step * 7) % 24, nbytes=20_000)
    assert store.put(chunk), store.stats().refused
    other = make_chunk((offset * 3 + step * 5) % 24, nbytes=20_000)
    found = store.get(other.meta.id)
    wrong += found is not None and not same_bits(found.tensor, other.tensor)
    if step % 11 == 0:
        store.delete(other.meta.id)
assert store.stats().entries <= 10
assert wrong == 0
assert store.stats().corrupt == 0, "a chunk was taken for damaged"
store.close()
"""

ENDLESS = """
import itertools, sys
from dejakv.store import open_store
from dejakv.testing.chunks import make_chunk
store = open_store(sys.argv[1], max_bytes=3_000_000)
print("ready", flush=True)
for number in itertools.count(int(sys.argv[2])):
    store.put(make_chunk(number, nbytes=(number % 5 + 1) * 60_000))
    store.get(make_chunk(number - 3, nbytes=((number - 3) % 5 + 1) * 60_000).meta.id)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", process.communicate()[1].decode()
    return process


def check_everything(folder: Path) -> int:
    """Opens the folder and reads all that it lists; how many entries there are."""
    store = open_store(
        folder, max_bytes=3_000_000
    )  # as who was killed: what it had no row for yet may be beyond its budget
    metas = list(store.metas())
    for meta in metas:
        found = store.get(meta.id)
        assert found is not None, meta.id
        number = meta.token_ids[0]
        assert same_bits(found.tensor, make_chunk(number, nbytes=(number % 5 + 1) * 60_000).tensor)
    assert store.stats().corrupt == 0
    assert store.stats().entries == len(metas)
    assert len(list((folder / "segments").glob("*/*"))) == len(metas)
    assert list((folder / "temporary").iterdir()) == []
    held = sum(path.stat().st_size for path in (folder / "segments").glob("*/*"))
    assert held <= store.stats().bytes <= 3_000_000
    store.close()
    return len(metas)


def test_two_processes_hammer_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    processes = [start(HAMMER, folder, offset) for offset in (0, 13)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    store = open_store(folder)
    metas = list(store.metas())
    assert len(metas) == store.stats().entries <= 10
    assert len(list((folder / "segments").glob("*/*"))) == len(metas)
    for meta in metas:
        assert store.get(meta.id) is not None
    store.close()


def test_kill_9_during_writes_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rounds = random.Random(0)
    entries = 0
    for attempt in range(6):
        process = start(ENDLESS, folder, attempt * 1000)
        time.sleep(rounds.uniform(0.02, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        entries = check_everything(folder)
    assert entries > 3


def test_kill_9_of_one_leaves_the_other_at_work(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = open_store(folder, max_bytes=3_000_000)
    for attempt in range(3):
        process = start(ENDLESS, folder, attempt * 1000)
        number = 500_000 + attempt
        chunk = make_chunk(number, nbytes=(number % 5 + 1) * 60_000)
        assert store.put(chunk)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert store.put(chunk)
        found = store.get(chunk.meta.id)
        assert found is not None
        assert same_bits(found.tensor, chunk.tensor)
    store.close()
    check_everything(folder)


def test_what_another_process_does_is_seen(tmp_path: Path) -> None:
    """Two stores in one process have connections of their own, as two processes do."""
    one, two = open_store(tmp_path / "store"), open_store(tmp_path / "store")
    told: list[str] = []
    one.on_evict(told.append)
    chunks = [make_chunk(number) for number in range(3)]
    for chunk in chunks:
        one.put(chunk)
    assert two.get(chunks[0].meta.id) is not None
    assert one.meta(chunks[0].meta.id) is not None
    assert two.delete(chunks[0].meta.id)
    assert one.meta(chunks[0].meta.id) is None
    assert one.get(chunks[0].meta.id) is None
    assert told == [chunks[0].meta.id]
    # Replaced elsewhere: this process still knows the old file's name.
    assert one.get(chunks[1].meta.id) is not None
    again = make_chunk(1, seed=99)
    assert two.put(again)
    found = one.get(chunks[1].meta.id)
    assert found is not None
    assert same_bits(found.tensor, again.tensor)
    assert one.stats().corrupt == 0
    assert one.delete(chunks[2].meta.id)
    assert told == [chunks[0].meta.id, chunks[2].meta.id]
    one.close()
    two.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_a_connection_of_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_chunk(0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            good = store.get(make_chunk(0).meta.id) is not None and store.put(make_chunk(1))
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get(make_chunk(1).meta.id) is not None
    assert store.put(make_chunk(2))
    assert store.stats().entries == 3
    store.close()


@pytest.mark.parametrize("entries", [3, 300])
def test_what_another_process_clears_is_not_served_from_memory(
    tmp_path: Path, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when more was cleared than the journal names."""
    monkeypatch.setattr(changes, "_JOURNAL_ROWS", 100)
    one = open_store(tmp_path / "store", memory_bytes=1 << 24)
    told: list[str] = []
    one.on_evict(told.append)
    mine = [make_chunk(number, nbytes=64, partition="a") for number in range(entries)]
    kept = make_chunk(0, nbytes=64, partition="b")
    for chunk in (*mine, kept):
        assert one.put(chunk)
        assert one.get(chunk.meta.id) is not None
    two = open_store(tmp_path / "store")
    assert two.clear("a") == entries
    assert one.get(mine[0].meta.id) is None
    assert one.meta(mine[1].meta.id) is None
    assert [meta.id for meta in one.metas()] == [kept.meta.id]
    assert one.get(kept.meta.id) is not None
    assert set(told) <= {chunk.meta.id for chunk in mine}
    assert entries > 3 or len(set(told)) == entries, "all that the journal names"
    two.close()
    one.close()
