"""Two processes on one folder, and processes that are killed while they write."""

import subprocess
import sys
from pathlib import Path

import pytest

from dejakv.store import changes, open_store
from dejakv.testing.chunks import make_chunk

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
