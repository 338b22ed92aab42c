"""A folder that is full, read-only, someone else's or left in disorder."""

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services import python

from dejakv.errors import StoreError
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stored_states import make_stored_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(0))
    yield store
    store.close()


def test_nobody_else_may_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "store").mkdir(mode=0o777)
        store = open_store(tmp_path / "store")
        store.put(make_stored_state(0))
        for path in [(tmp_path / "store"), *(tmp_path / "store").rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(old)


def test_no_folder_can_be_made_there(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="give a folder you may write to"):
        open_store(tmp_path / "thesis.txt")
    with pytest.raises(StoreError, match="give a folder you may write to"):
        open_store("/proc/dejakv")


def test_a_disk_too_full_for_the_catalog_refuses(small_disk: Path) -> None:
    store = open_store(small_disk / "store")
    store.put(make_stored_state(0))
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    for number in range(1, 4):
        assert store.put(make_stored_state(number, nbytes=64)) is False
    assert store.stats("p").refused == {"full": 3}
    assert store.get(make_stored_state(0).meta.id) is not None
    store.close()


def test_a_disk_that_turns_read_only_refuses_and_is_still_read(small_disk: Path) -> None:
    # The catalog is open for writing, so a plain remount is refused; the folder for new files is what turns.
    temporary = small_disk / "store" / "temporary"
    store = open_store(small_disk / "store")
    assert store.put(make_stored_state(0))
    store.close()
    subprocess.run(["mount", "--bind", str(temporary), str(temporary)], check=True)
    store = open_store(small_disk / "store")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(temporary)], check=True)
        assert store.put(make_stored_state(1)) is False
        assert store.stats("p").refused == {"read_only": 1}
        assert store.get(make_stored_state(0).meta.id) is not None
    finally:
        store.close()
        subprocess.run(["umount", str(temporary)], check=True)


def test_a_read_only_disk_cannot_be_opened_and_says_so(small_disk: Path) -> None:
    open_store(small_disk / "store").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match=r"cannot be.*(rights|write to)"):
        open_store(small_disk / "store")


# A limit on descriptors is one of the whole process, and what other tests left in it may close some meanwhile: these
# two run in a process with nothing else in it.
WITHOUT_DESCRIPTORS = """
import os, resource, sys
from dejakv.errors import StoreError
from dejakv.store.open import open_store
from dejakv.testing.stored_states import make_stored_state

folder = sys.argv[1]
id = make_stored_state(0).meta.id
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
taken = [os.open("/dev/null", os.O_RDONLY)]


def take_all(spare):
    "Takes every descriptor but so many."
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while taken[-1] <= highest:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + spare, hard))


def give_back():
    while len(taken) > 1:
        os.close(taken.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""
AT_A_REQUEST = """
store = open_store(folder)
take_all(spare=0)
state, stored = store.get(id), store.put(make_stored_state(7))
give_back()
assert (state, stored) == (None, False)
assert store.stats("p").refused == {"error": 1}
assert store.stats().corrupt == 0
assert store.get(id) is not None
store.close()
"""
AT_THE_OPENING = """
store = None
for spare in range(30):
    take_all(spare)
    try:
        store = open_store(folder)
    except StoreError:
        continue
    finally:
        give_back()
    break
assert spare > 4
assert store.stats().corrupt == 0
assert store.get(id) is not None
store.close()
"""


@pytest.mark.parametrize("program", [AT_A_REQUEST, AT_THE_OPENING], ids=["at a request", "at the opening"])
def test_no_file_descriptors_left_is_a_miss_and_no_damage(store: Store, tmp_path: Path, program: str) -> None:
    store.close()
    ended = python("-c", WITHOUT_DESCRIPTORS + program, tmp_path / "store")
    assert ended.returncode == 0, ended.stderr


def test_leftovers_of_a_killed_process_are_swept_but_not_work_in_progress(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_stored_state(0))
    store.close()
    stale, busy, orphan = (f"{digit * 32}.safetensors" for digit in "123")
    left = tmp_path / "store" / "segments" / "33" / orphan
    (tmp_path / "store" / "temporary" / stale).write_bytes(b"half a segment")
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"no segment")
    mine = [
        (tmp_path / "store") / "temporary" / "thesis.tex",
        (tmp_path / "store") / "segments" / "notes.txt",
        left.parent / "x.safetensors",
    ]
    for path in mine:
        path.write_text("none of ours")
    code = (
        "import fcntl, os, sys\n"
        f"descriptor = os.open({str(tmp_path / 'store' / 'temporary' / busy)!r}, os.O_WRONLY | os.O_CREAT)\n"
        "fcntl.flock(descriptor, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read(); os.unlink(sys.argv[1])"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store" / "temporary" / busy)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"locked\n"
    again = open_store(tmp_path / "store")
    assert {path.name for path in ((tmp_path / "store") / "temporary").iterdir()} == {busy, "thesis.tex"}
    assert not left.exists()
    assert again.get(make_stored_state(0).meta.id) is not None
    again.close()
    writer.communicate()
    assert writer.returncode == 0
    assert [path.name for path in ((tmp_path / "store") / "temporary").iterdir()] == ["thesis.tex"]
    assert {path.read_text() for path in mine} == {"none of ours"}


@pytest.mark.parametrize("max_bytes", [0, 1 << 30], ids=["entries", "bytes too, which are met"])
def test_a_smaller_budget_at_the_next_opening_is_met(tmp_path: Path, max_bytes: int) -> None:
    store = open_store(tmp_path / "store")
    for number in range(6):
        store.put(make_stored_state(number))
    store.get(make_stored_state(0).meta.id)
    store.close()
    again = open_store(tmp_path / "store", max_entries=2, max_bytes=max_bytes)
    assert {meta.token_ids[0] for meta in again.metas()} == {0, 5}
    assert again.stats().evictions == {"entries": 4}
    assert len(list(((tmp_path / "store") / "segments").glob("*/*"))) == 2
    again.put(make_stored_state(6))
    assert again.stats().evictions == {"entries": 5}
    again.close()
