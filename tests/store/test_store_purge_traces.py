"""After a purge no byte of what was removed is left in a folder, whatever happened there before, and while others use it."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.reliability.test_reliability_full import files_no_larger_than, somebody_fills

from dejakv.errors import StoreError
from dejakv.store import open_store
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv.testing.stored_states import PREAMBLE, check_whole, ids, make_prompt_state

SECRET = tuple(range(70_000, 70_030))
DONOR = make_prompt_state(
    (*PREAMBLE, *SECRET), metadata={"note": "a secret note"}, answer="a secret answer", space="a secret space"
)
OTHERS = [make_prompt_state((*PREAMBLE, *range(first, first + 30))) for first in range(2000, 8000, 100)]


def traces(folder: Path, tokens: Sequence[int] = SECRET) -> list[str]:
    """The files in which a run of the tokens, a text of the prompt or its state stands."""
    raw = DONOR.tensor.data[:, :, :, len(PREAMBLE) :]
    wanted = [
        np.array(tokens[:8], "<u4").tobytes(),
        b"secret",
        f"prompt {tokens[-1]}".encode(),
        raw[0, 0, 0].tobytes(),
    ]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(part in path.read_bytes() for part in wanted)
    ]


def filled(store: Store) -> None:
    for number, stored_state in enumerate(OTHERS):
        assert store.put(stored_state)
        if number == len(OTHERS) // 2:
            assert store.put(DONOR)


def test_no_byte_is_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    filled(store)
    assert traces(tmp_path)
    purged = store.purge(Selection(donors=(DONOR.meta.id,)))
    assert purged.prompts == 1
    assert traces(tmp_path) == []
    check_whole(store, OTHERS)
    store.close()
    assert traces(tmp_path) == []


def test_a_deletion_alone_leaves_some(tmp_path: Path) -> None:
    """The check above can fail: the log of the catalog remembers."""
    store = open_store(tmp_path)
    filled(store)
    store.delete(DONOR.meta.id)
    assert traces(tmp_path)
    store.close()


def test_while_others_use_the_folder(tmp_path: Path) -> None:
    """Another store of the folder, with a tier in memory and entries that it knows, finds the purged prompt no more."""
    server, command = open_store(tmp_path, memory_bytes=1 << 20), open_store(tmp_path)
    gone: list[str] = []
    server.listen(removed=gone.append)
    filled(server)
    assert server.get(DONOR.meta.id) is not None
    command.purge(Selection(donors=(DONOR.meta.id,)))
    assert traces(tmp_path) == []
    assert server.get(DONOR.meta.id) is None
    assert DONOR.meta.id not in ids(server)
    assert DONOR.meta.id in gone
    check_whole(server, OTHERS)
    server.close()
    command.close()


def test_damaged_files_leave_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    filled(store)
    file = next(path for path in tmp_path.glob("segments/*/*") if DONOR.meta.id.encode() in path.read_bytes())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert store.get(DONOR.meta.id) is None
    assert not file.exists()
    store.purge(Selection())
    assert traces(tmp_path) == []
    store.close()


CHECKPOINT = """
import fcntl, sys
with open(sys.argv[1], "r+b") as shared:
    fcntl.lockf(shared, fcntl.LOCK_EX, 1, 121)
    print("held", flush=True)
    sys.stdin.readline()
"""
"""Holds SQLite's lock of a checkpoint (WAL_CKPT_LOCK), as another process does that writes its log back."""


def test_a_checkpoint_of_another_process_is_waited_for(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    filled(store)
    command = [sys.executable, "-c", CHECKPOINT, str(tmp_path / "catalog.sqlite-shm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        leaves = threading.Timer(0.5, other.stdin.close)
        leaves.start()
        purged = store.purge(Selection(donors=(DONOR.meta.id,)))
        leaves.join()
    assert purged.prompts == 1
    assert traces(tmp_path) == []
    store.close()


@pytest.mark.parametrize("size", [250_000, 400_000])
def test_a_full_disk_is_no_hindrance(tmp_path: Path, size: int) -> None:
    """The catalog's change needs space, and a tensor that is to go makes some."""
    store = open_store(tmp_path)
    with files_no_larger_than(size):
        taken = [stored_state for stored_state in OTHERS if store.put(stored_state)]
        assert 0 < len(taken) < len(OTHERS)
        ids = tuple(stored_state.meta.id for stored_state in taken)
        purged = store.purge(Selection(donors=ids))
        assert purged.prompts == len(taken)
    assert list((tmp_path / "segments").glob("*/*")) == []
    assert [id for id in ids if store.get(id) is not None] == []
    assert store.put(DONOR)
    store.close()


@pytest.mark.parametrize("chosen", [Selection(), Selection(donors=(DONOR.meta.id,))], ids=["all", "donor"])
@pytest.mark.parametrize(
    ("others", "room", "left"), [(0, 0, "entries"), (20, 0, "entries"), (20, 80_000, r"text .* catalog\.sqlite-wal")]
)
def test_text_that_a_full_disk_keeps_is_no_finished_purge(
    small_disk: Path, others: int, room: int, left: str, chosen: Selection
) -> None:
    """A change needs room in the log, and the log is written back into a file that grows: the purge says what is left, and how it ends."""
    folder, spare = small_disk / "store", small_disk / "spare"
    store = open_store(folder)
    for stored_state in (*OTHERS[:others], DONOR):
        assert store.put(stored_state)
    spare.write_bytes(bytes(room))
    with somebody_fills(small_disk, 65536):
        spare.unlink()
        with pytest.raises(StoreError, match=f"{left} could not be removed .*: make room on its disk and purge again"):
            store.purge(chosen)
        assert traces(folder)
    store.purge(chosen)
    assert traces(folder) == []
    store.close()
    assert traces(folder) == []


def test_what_cannot_be_written_is_not_called_purged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    filled(store)
    with files_no_larger_than(4096), pytest.raises(StoreError, match="purge again"):
        store.purge(Selection())
    store.purge(Selection())
    assert traces(tmp_path) == []
    store.close()
