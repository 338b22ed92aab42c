"""Objects that describe themselves: damage, kept maps, and a catalog that is made again from them."""

import os
import sqlite3
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from tests.reliability import crash_program

from dejakv.errors import StoreError
from dejakv.identity import MediumSpan
from dejakv.store import Store, objects, open_store, purge_folder
from dejakv.store.base import ROWS, CorruptState, RawTensor, StateInfo, StoredState
from dejakv.store.catalog import Catalog, EntryRow
from dejakv.store.objects import MemoryObjects
from dejakv.store.prefix_keys import ends_of
from dejakv.store.selection import DONORS, Selection
from dejakv.testing.stored_states import PREAMBLE, check_whole, ids, make_prompt_state

LONG = tuple(range(1000, 2000))
SPANS = (MediumSpan(5, 300, "ab" * 32),)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segments/*/*"), key=lambda path: path.stat().st_mtime_ns)


def rows(donor: StoredState) -> StoredState:
    made = make_prompt_state((1, 2, 3), kind=ROWS, metadata={DONORS: [donor.meta.id]}, generation=2, position=7)
    return StoredState(made.meta, made.tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = open_store(folder)
    yield store
    store.close()


def test_a_segment_is_a_safetensors_file_that_says_all(store: Store, folder: Path) -> None:
    assert store.put(make_prompt_state(LONG, spans=SPANS, created=5.0, ttl=1e12))
    assert len(files(folder)) == 4
    for path in files(folder):
        with safe_open(path, "numpy") as file:
            about = file.metadata()
            start, stop = int(about["start"]), int(about["stop"])
            assert stop - start <= 256
            assert list(file.get_tensor("ids")) == list(LONG[start:stop])
            assert file.get_tensor("state").shape == (2, 1, 1, stop - start, 2)
            inside = [span for span in SPANS if span.start < stop and span.start + span.length > start]
            assert len(file.get_tensor("keys")) == len(ends_of(start, stop, inside))
        assert {"format", "partition", "epoch", "kind", "position", "generation", "lineage", "created", "ttl"} <= set(
            about
        )


@pytest.mark.parametrize("where", [0.0, 0.01, 0.2, 0.5, 0.9, 0.9999])
def test_a_flipped_bit_costs_what_needs_the_segment_and_no_more(store: Store, folder: Path, where: float) -> None:
    first, second = make_prompt_state(LONG[:256]), make_prompt_state(LONG[:600])
    for stored_state in (first, second):
        assert store.put(stored_state)
    path = files(folder)[-1]
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= 4
    path.write_bytes(raw)
    assert store.get(second.meta.id) is None
    assert (store.stats().corrupt, store.stats().misses) == (1, 1)
    check_whole(store, [first])
    assert ids(store) == {first.meta.id}
    assert not path.exists()
    assert store.put(second)
    check_whole(store, [first, second])


@pytest.mark.parametrize("how", ["truncated", "changed", "gone", "replaced"])
def test_a_file_that_changes_under_a_kept_map_is_a_counted_miss(store: Store, folder: Path, how: str) -> None:
    data = np.random.default_rng(0).standard_normal((2, 4, 8, 200, 64)).astype(np.float32)
    plain = make_prompt_state(LONG[:200])
    stored_state = StoredState(plain.meta, RawTensor(data, "F32"))
    assert store.put(stored_state)
    for _ in range(2):
        found = store.get(stored_state.meta.id)
        assert found is not None
        np.testing.assert_array_equal(found.tensor.data, data)
    del found
    (path,) = files(folder)
    if how == "truncated":
        os.truncate(path, 5000)
    elif how == "changed":
        with path.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"?")
    elif how == "gone":
        path.unlink()
    else:
        other = path.with_name("other")
        other.write_bytes(path.read_bytes()[:-1] + b"?")
        other.rename(path)
    assert store.get(stored_state.meta.id) is None
    assert (store.stats().corrupt, store.stats().misses) == (1, 1)
    assert store.put(stored_state)
    assert store.get(stored_state.meta.id) is not None


def test_a_kept_map_is_verified_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from dejakv.store import store as module

    data = np.zeros((2, 4, 8, 200, 64), np.float32)
    stored_state = StoredState(make_prompt_state(LONG[:200]).meta, RawTensor(data, "F32"))
    assert store.put(stored_state)
    verified: list[str] = []
    opened = module.open_object
    monkeypatch.setattr(module, "open_object", lambda data, name: (verified.append(name), opened(data, name))[1])
    for _ in range(5):
        assert store.get(stored_state.meta.id) is not None
    assert len(verified) == 1


@pytest.mark.parametrize("mapped", [True, False])
def test_what_was_verified_is_kept_as_long_as_its_map(
    store: Store, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """A map keeps a descriptor open before Python 3.13, and a copy takes memory: thousands are verified."""
    monkeypatch.setattr(objects, "MAX_MAPS", 2)
    monkeypatch.setattr(objects, "MAP_FROM_BYTES", 1 if mapped else 1 << 30)
    kept: list[weakref.ref[NDArray[np.uint8]]] = []
    for number in range(6):
        meta = StateInfo(str(number), "p", "e", (), "", "", kind="encoder")
        assert store.put(StoredState(meta, RawTensor(np.full(5000, number, np.uint8), "U8")))
        state = store.get(str(number))
        assert state is not None
        assert (state.tensor.data == number).all()
        kept.append(weakref.ref(state.tensor.data.base))
        del state
    assert [each() is not None for each in kept] == [False] * 4 + [mapped] * 2


@pytest.mark.parametrize("damage", ["deleted", "damaged", "emptied", "foreign"])
def test_the_catalog_is_made_again_from_the_objects(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(folder)
    stored_state, picture = make_prompt_state(LONG), make_prompt_state(LONG[:400], spans=SPANS)
    of_blend = rows(stored_state)
    for one in (stored_state, picture, of_blend):
        assert store.put(one)
    store.close()
    path = folder / "catalog.sqlite"
    if damage == "deleted":
        path.unlink()
    elif damage == "damaged":
        path.write_bytes(b"damaged" * 1000)
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE chunks (id TEXT)")
        path.chmod(0o600)
    again = open_store(folder)
    for one, spans in ((stored_state, ()), (picture, SPANS)):
        hit = again.find("p", "e", one.meta.token_ids, spans, whole=True)
        assert hit is not None
        assert hit[0].tokens == one.meta.num_tokens
        parts = again.get_parts(hit[0].donor)
        assert parts is not None
        data = np.concatenate([part.tensor.data for part in parts], axis=3)
        np.testing.assert_array_equal(data, one.tensor.data)
    check_whole(again, [of_blend])
    found = again.meta(of_blend.meta.id)
    assert found is not None
    assert (found.generation, found.position, found.metadata) == (2, 7, of_blend.meta.metadata)
    assert again.put(stored_state), "the prompt's own description comes with its next answer"
    check_whole(again, [stored_state])
    assert again.purge(Selection("p")).rows == 1
    assert (files(folder), again.stats().bytes) == ([], 0)
    again.close()


def test_a_catalog_that_leaves_under_a_running_process_is_not_made_twice(store: Store, folder: Path) -> None:
    stored_state = make_prompt_state(LONG)
    assert store.put(stored_state)
    (folder / "catalog.sqlite").unlink()
    with pytest.raises(StoreError, match=r"missing or damaged.*other processes use it: end them"):
        open_store(folder)
    check_whole(store, [stored_state])
    store.close()
    again = open_store(folder)
    assert again.find("p", "e", LONG) is not None
    again.close()


def test_rows_and_objects_are_reconciled(folder: Path) -> None:
    store = open_store(folder)
    stored_states = [make_prompt_state((*PREAMBLE, *range(n, n + 60))) for n in (100, 200, 300)]
    assert store.put(stored_states[0])
    kept = files(folder)
    for stored_state in stored_states[1:]:
        assert store.put(stored_state)
    lost = next(path for path in files(folder) if path not in kept)
    store.close()
    extra = kept[0].read_bytes()
    lost.unlink()
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as connection:
        connection.execute("DELETE FROM segments WHERE name = ?", (kept[0].stem,))
        connection.execute("DELETE FROM blocks WHERE n NOT IN (SELECT n FROM segments)")
        connection.commit()
    again = open_store(folder)
    hit = again.find("p", "e", stored_states[0].meta.token_ids)
    assert hit is not None
    assert hit[0].tokens == 99
    assert kept[0].read_bytes() == extra
    assert all(again.get(meta.id) is not None for meta in again.metas() if meta.id != stored_states[0].meta.id)
    again.close()


def test_what_cannot_be_read_now_is_not_removed(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_state = make_prompt_state(LONG)
    assert store.put(stored_state)
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> int:
            raise OSError(5, "Input/output error")

        patched.setattr(os, "pread", fail)
        assert store.get(stored_state.meta.id) is None
    assert store.stats().corrupt == 0
    assert len(files(folder)) == 4
    check_whole(store, [stored_state])


@pytest.mark.parametrize("format", [1, 2])
def test_a_folder_of_an_older_format_is_refused_and_can_be_removed(folder: Path, format: int) -> None:
    stored_state = folder / "chunks" / "ab" / f"ab{'0' * 30}-{'1' * 8}.safetensors"
    stored_state.parent.mkdir(parents=True)
    stored_state.write_bytes(b"old")
    (folder / "catalog.sqlite").write_bytes(b"old")
    (folder / "dejakv-store.json").write_text(f'{{"id": "x", "format": {format}}}')
    (folder / "dejakv-store.json").chmod(0o600)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"format {format}, of an older DejaKV.*dejakv cache purge.*--all"):
            open_store(folder)
        assert stored_state.read_bytes() == b"old", "never destroyed"
    assert purge_folder(folder) == 3
    assert not folder.exists()


def test_a_newer_object_is_no_segment_of_ours(store: Store, folder: Path) -> None:
    from dejakv.store.segment import read_description

    assert store.put(make_prompt_state(LONG[:20]))
    raw = files(folder)[0].read_bytes()
    read_description(lambda need: (raw[:need], len(raw)))
    newer = raw.replace(b"dejakv-segment-3", b"dejakv-segment-9")
    with pytest.raises(CorruptState, match="another format"):
        read_description(lambda need: (newer[:need], len(newer)))


def test_budgets_hold_after_a_rebuild(folder: Path) -> None:
    store = open_store(folder)
    for number in range(8):
        assert store.put(make_prompt_state(range(number * 1000, number * 1000 + 300), width=16))
    held = store.stats().bytes
    store.close()
    (folder / "catalog.sqlite").unlink()
    again = open_store(folder, max_bytes=held // 2)
    assert 0 < again.stats().bytes <= held // 2
    again.close()


def test_expired_objects_are_not_indexed_again(folder: Path) -> None:
    store = open_store(folder, background=False)
    assert store.put(make_prompt_state(LONG, created=time.time() - 100, ttl=1.0))
    store.close()
    (folder / "catalog.sqlite").unlink()
    again = open_store(folder, background=False)
    assert (again.stats().bytes, files(folder)) == (0, [])
    again.close()


def test_a_description_is_read_with_its_own_rows() -> None:
    """Not with those of what another process puts in its place between the two reads."""

    class Between(Catalog):
        def entry(self, id: str, now: float) -> EntryRow | None:
            found = super().entry(id, now)
            while meanwhile:
                assert writer.put(meanwhile.pop())
            return found

    catalog, objects, meanwhile = Between(None), MemoryObjects(), list[StoredState]()
    writer, reader = Store(objects, catalog), Store(objects, catalog)
    assert writer.put(crash_program.state_of(0, 0, 1))
    meanwhile.append(crash_program.state_of(0, 0, 2))
    found = reader.get(crash_program.id_of(0, 0))
    assert found is not None
    assert found.meta.prompt == "2"
    assert crash_program.is_whole(found)
