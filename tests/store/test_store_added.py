"""What came since the last look, by any process: neither read twice nor missed."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejakv.store import known
from dejakv.store.base import Chunk, ChunkMeta, TellsNew, Tensor
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.expiry import ExpiringStore
from dejakv.testing.prompts import prompt_chunk


def put(store: DiskStore, *names: str) -> None:
    for name in names:
        meta = ChunkMeta(name * 40, "p", "e", (1, 2, 3), "", "")
        assert store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, 3, 4), np.float32), "F32")))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Descriptions that this thread has decoded; the one that removes expired entries reads what it removes."""
    seen: list[bytes] = []
    decode, ours = known.decode_meta, threading.current_thread()

    def noting(blob: bytes) -> ChunkMeta:
        if threading.current_thread() is ours:
            seen.append(blob)
        return decode(blob)

    monkeypatch.setattr(known, "decode_meta", noting)
    return seen


def test_only_what_is_new_is_read(tmp_path: Path, decoded: list[bytes]) -> None:
    ours, theirs = DiskStore(tmp_path / "s"), DiskStore(tmp_path / "s")
    assert isinstance(ours, TellsNew)
    assert ours.added() == ([], None)
    put(theirs, "a", "b", "c")
    metas, mark = ours.added(None)
    assert [meta.id[0] for meta in metas] == ["a", "b", "c"]
    del decoded[:]
    assert ours.added(mark) == ([], mark)
    assert decoded == []
    put(theirs, "d")
    put(ours, "e")
    metas, mark = ours.added(mark)
    assert [meta.id[0] for meta in metas] == ["d", "e"]
    assert len(decoded) == 2
    theirs.delete("a" * 40)
    assert ours.added(mark) == ([], mark)


def test_a_store_in_front_reads_only_what_is_new_too(tmp_path: Path, decoded: list[bytes]) -> None:
    """What vLLM's connector and the server look into, nodes and expired prompts left out."""
    ours, theirs = ExpiringStore(DeltaStore(DiskStore(tmp_path / "s"))), DeltaStore(DiskStore(tmp_path / "s"))
    assert isinstance(ours, TellsNew)
    begins = tuple(range(40))
    first, second, third = (prompt_chunk((*begins, *range(n, n + 20))) for n in (100, 200, 300))
    expired = replace(third, meta=replace(third.meta, ttl=1.0))
    assert theirs.put(first)
    metas, mark = ours.added()
    assert [meta.id for meta in metas] == [first.meta.id]
    for chunk in (second, expired):
        assert theirs.put(chunk)
    del decoded[:]
    metas, mark = ours.added(mark)
    assert second.meta.id in {meta.id for meta in metas}
    assert not {meta.kind for meta in metas} - {"kv"}
    assert expired.meta.id not in {meta.id for meta in metas}
    del decoded[:]
    assert ours.added(mark)[0] == []
    assert decoded == []
    ours.close()
    theirs.close()


def test_what_takes_the_place_of_the_newest_is_not_missed(tmp_path: Path) -> None:
    """SQLite gives the number of a removed last row again."""
    ours, theirs = DiskStore(tmp_path / "s"), DiskStore(tmp_path / "s")
    put(theirs, "a", "b")
    _, mark = ours.added()
    theirs.delete("b" * 40)
    put(theirs, "c")
    metas, mark = ours.added(mark)
    assert "c" * 40 in {meta.id for meta in metas}
    theirs.clear()
    assert ours.added(mark) == ([], None)
    put(theirs, "d")
    assert [meta.id[0] for meta in ours.added(None)[0]] == ["d"]
