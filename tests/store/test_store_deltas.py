"""A store without duplicates: what it takes, and what others do to it meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from tests.store.layers import layer

from dejakv.identity import Span
from dejakv.store import open_store
from dejakv.store.base import NODE, Chunk, Store, Tensor
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from dejakv.store.parts import outside_media
from dejakv.store.wrapper import WrapperStore
from dejakv.testing.prompts import PREAMBLE, check_whole, ids, prompt_chunk, told_by, turns

SMOLLM2 = (30, 3, 64)
"""Layers, KV heads, head_dim."""


def at_full_size(chunk: Chunk) -> Chunk:
    """The chunk in SmolLM2's shape in bfloat16: its rows repeated in every layer and head."""
    layers, heads, width = SMOLLM2
    rows = chunk.tensor.data.view(np.uint16)[:, :1, :1, :, :4]
    data = np.tile(rows, (1, layers, heads, 1, width // 4))
    return Chunk(chunk.meta, Tensor(data, "BF16"))


def conversations() -> list[Chunk]:
    """40 turns after a preamble, and 20 other prompts that begin with the preamble."""
    others = [prompt_chunk((*PREAMBLE, *range(first, first + 30))) for first in range(20_000, 22_000, 100)]
    return [at_full_size(chunk) for chunk in [*turns(40), *others]]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_prompts_take_the_bytes_of_their_distinct_tokens(tmp_path: Path, kind: str) -> None:
    where = {"memory": None, "disk": tmp_path / "store"}[kind]
    chunks = conversations()
    distinct = {chunk.meta.token_ids[: place + 1] for chunk in chunks for place in range(chunk.meta.num_tokens)}
    layers, heads, width = SMOLLM2
    with closing(open_store(where)) as store:
        for chunk in chunks:
            assert store.put(chunk)
        assert store.stats().bytes <= 1.05 * len(distinct) * 2 * layers * heads * width * 2
        check_whole(store, chunks)
        if kind == "disk":
            held = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
            assert held <= 1.05 * len(distinct) * 2 * layers * heads * width * 2 + (4 << 20), "with the catalog's log"
        assert store.clear() == len(chunks)


def test_after_a_restart_prompts_are_whole_and_get_children(tmp_path: Path) -> None:
    chunks = turns(6)
    with closing(open_store(tmp_path / "store")) as store:
        for chunk in chunks[:4]:
            assert store.put(chunk)
    with closing(open_store(tmp_path / "store")) as store:
        check_whole(store, chunks[:4])
        for chunk in chunks[4:]:
            assert store.put(chunk)
        metas = {meta.id: meta for meta in store.metas()}
        assert [metas[chunk.meta.id].parent for chunk in chunks] == ["", *(chunk.meta.id for chunk in chunks[:-1])]
        check_whole(store, chunks)


class Interrupted(WrapperStore):
    """Does something before the next call of a method, as another process might."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.before: dict[str, Callable[[], object]] = {}

    def _meet(self, name: str) -> None:
        self.before.pop(name, lambda: None)()

    def put(self, chunk: Chunk) -> bool:
        self._meet("put")
        return super().put(chunk)

    def get(self, id: str) -> Chunk | None:
        self._meet("get")
        return super().get(id)

    def split(self, node: Chunk, rest: Chunk) -> bool:
        self._meet("split")
        return super().split(node, rest)


@pytest.fixture(params=["memory", "disk"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make: dict[str, Callable[[], Store]] = {
        "memory": MemoryStore,
        "disk": lambda: DiskStore(tmp_path / "store"),
    }
    with closing(make[request.param]()) as store:
        yield store


def test_a_parent_that_leaves_before_its_child_is_stored(backend: Store) -> None:
    inner = Interrupted(backend)
    store = DeltaStore(inner)
    first, second = turns(2)
    assert store.put(first)
    inner.before["put"] = lambda: backend.delete(first.meta.id)
    assert store.put(second)
    check_whole(store, [second])
    assert ids(store) == {second.meta.id}
    assert backend.stats().refused == {"parent": 1}


def test_what_is_deleted_while_it_is_split_stays_deleted(backend: Store) -> None:
    inner = Interrupted(backend)
    store = DeltaStore(inner)
    one, other = (prompt_chunk((*PREAMBLE, *range(first, first + 20))) for first in (100, 200))
    assert store.put(one)
    inner.before["split"] = lambda: backend.delete(one.meta.id)
    assert store.put(other)
    assert {meta.id for meta in backend.metas()} == {other.meta.id}
    check_whole(store, [other])


def test_two_that_split_the_same_prompt_differently(backend: Store) -> None:
    inner = Interrupted(backend)
    mine, theirs = DeltaStore(inner), DeltaStore(backend)
    held = prompt_chunk((*PREAMBLE, *range(20)))
    near = prompt_chunk((*PREAMBLE[:20], *range(300, 320)))
    far = prompt_chunk((*PREAMBLE, *range(400, 420)))
    assert mine.put(held)
    inner.before["split"] = lambda: theirs.put(near)
    assert mine.put(far)
    for store in (mine, theirs):
        check_whole(store, [held, near, far])
    assert mine.clear() == 3
    assert backend.stats().bytes == 0


def test_what_changes_while_it_is_read_is_read_again(backend: Store) -> None:
    inner = Interrupted(backend)
    mine, theirs = DeltaStore(inner), DeltaStore(backend)
    held = prompt_chunk((*PREAMBLE, *range(20)))
    assert mine.put(held)
    inner.before["get"] = lambda: theirs.put(prompt_chunk((*PREAMBLE, *range(400, 420))))
    check_whole(mine, [held])
    assert mine.stats().misses == 0


def test_a_damaged_part_costs_what_needs_it_and_is_counted_once(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "store")) as store:
        first, *rest = turns(4)
        other = prompt_chunk(range(9000, 9050))
        for chunk in (first, *rest, other):
            assert store.put(chunk)
        told = told_by(store)
        meta = store.meta(rest[0].meta.id)
        assert meta is not None
        damage(tmp_path / "store", rest[0].meta.id)
        assert store.get(rest[2].meta.id) is None
        stats = store.stats()
        assert (stats.corrupt, stats.misses, stats.entries) == (1, 1, 2)
        assert set(told) == {chunk.meta.id for chunk in rest}
        for chunk in rest:
            assert store.meta(chunk.meta.id) is None
            assert store.get(chunk.meta.id) is None
        check_whole(store, [first, other])
        assert store.stats().corrupt == 1
        for chunk in rest:
            assert store.put(chunk)
        check_whole(store, [first, *rest, other])


def test_a_part_whose_file_is_gone_at_opening(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    chunks = turns(3)
    with closing(open_store(folder)) as store:
        for chunk in chunks:
            assert store.put(chunk)
    file_of(folder, chunks[1].meta.id).unlink()
    with closing(open_store(folder)) as store:
        assert ids(store) == {chunks[0].meta.id}
        assert (store.stats().corrupt, store.stats().entries) == (1, 1)
        assert len(list((folder / "chunks").glob("*/*"))) == 1


def test_a_damaged_description_of_a_parent(tmp_path: Path) -> None:
    import sqlite3

    chunks = turns(3)
    with closing(open_store(tmp_path / "store")) as store:
        for chunk in chunks:
            assert store.put(chunk)
    with closing(sqlite3.connect(tmp_path / "store" / "catalog.sqlite")) as connection:
        connection.execute("UPDATE chunks SET parent = 'x' WHERE id = ?", (chunks[1].meta.id,))
        connection.commit()
    with closing(open_store(tmp_path / "store")) as store:
        assert store.get(chunks[2].meta.id) is None
        check_whole(store, chunks[:1])
        assert ids(store) == {chunks[0].meta.id}


def test_parts_of_other_shapes_are_not_put_together() -> None:
    backend = MemoryStore()
    store = DeltaStore(backend)
    first, second = turns(2)
    assert store.put(first)
    wider = prompt_chunk(second.meta.token_ids, width=3)
    assert store.put(wider)
    check_whole(store, [first, wider])
    flat = Chunk(first.meta, Tensor(first.tensor.data.reshape(2, 1, 2, -1, 1), "F32"))
    assert store.put(second)
    assert backend.put(flat), "as many bytes a row, in another shape"
    assert store.get(second.meta.id) is None or store.meta(second.meta.id) is not None


def test_no_medium_is_cut() -> None:
    spans = [Span(10, 5, "a"), Span(20, 5, "b")]
    assert [outside_media(tokens, spans) for tokens in (9, 10, 11, 14, 15, 22, 25, 30)] == [
        9,
        10,
        10,
        10,
        15,
        20,
        25,
        30,
    ]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_threads_share_a_store_of_prompts(tmp_path: Path, kind: str) -> None:
    chunks = [*turns(5), *(prompt_chunk((*PREAMBLE, *range(first, first + 20))) for first in range(3000, 3400, 100))]
    where = None if kind == "memory" else tmp_path / "store"
    wrong: list[object] = []

    def work(store: Store, seed: int) -> None:
        rnd = np.random.default_rng(seed)
        try:
            for step in range(60):
                chunk = chunks[rnd.integers(len(chunks))]
                store.put(chunk)
                wanted = chunks[rnd.integers(len(chunks))]
                found = store.get(wanted.meta.id)
                if found is not None and found.tensor.data.tobytes() != wanted.tensor.data.tobytes():
                    wrong.append(found.meta.id)
                if step % 5 == 0:
                    store.delete(wanted.meta.id)
        except Exception as error:
            wrong.append(error)

    with ExitStack() as stack:
        stores = [stack.enter_context(closing(open_store(where, max_bytes=30_000)))]
        stores.append(stores[0] if where is None else stack.enter_context(closing(open_store(where, max_bytes=30_000))))
        threads = [threading.Thread(target=work, args=(stores[seed % 2], seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert stores[0].stats().corrupt == 0
        stores[0].clear()
        assert (stores[0].stats().entries, stores[0].stats().bytes) == (0, 0)
        assert not [meta for meta in layer(stores[0], DeltaStore).inner.metas() if meta.kind == NODE]


def file_of(folder: Path, id: str) -> Path:
    (path,) = (path for path in (folder / "chunks").glob("*/*") if id.encode() in path.read_bytes()[:1000])
    return path


def damage(folder: Path, id: str) -> None:
    path = file_of(folder, id)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)
