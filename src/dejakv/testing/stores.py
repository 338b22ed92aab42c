"""The conformance suite of stores. Subclass `StoreTests`, override `make_store`, and let pytest collect it."""

import threading
from pathlib import Path

import numpy as np
import pytest

from dejakv.identity import Span
from dejakv.store.base import Chunk, Tensor
from dejakv.store.store import Store
from dejakv.testing.chunks import DTYPES, make_chunk, same_bits, size_in
from dejakv.testing.made_store import MadeStore


class StoreTests(MadeStore):
    """What every `dejakv.store.Store` must do."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_chunk_comes_back_as_it_went_in(self, store: Store, dtype: str) -> None:
        chunk = make_chunk(
            dtype=dtype,
            spans=(Span(2, 4, "ab" * 32),),
            embedder="embedder-1",
            vectors={"prompt": np.linspace(-1, 1, 7, dtype=np.float32), "vision": np.zeros(0, np.float32)},
            answer="Blue.\n",
            created=123.5,
            metadata={"image": "x.png", "n": 3, "nested": {"a": [1, None]}},
        )
        assert store.put(chunk) is True
        found = store.get(chunk.meta.id)
        assert found is not None
        assert same_bits(found.tensor, chunk.tensor)
        assert found.tensor.data.dtype == chunk.tensor.data.dtype
        for name in ("id", "partition", "epoch", "token_ids", "prompt", "chunk", "space", "spans", "kind", "embedder"):
            assert getattr(found.meta, name) == getattr(chunk.meta, name), name
        assert (found.meta.answer, found.meta.created, dict(found.meta.metadata)) == (
            chunk.meta.answer,
            chunk.meta.created,
            dict(chunk.meta.metadata),
        )
        assert found.meta.nbytes == chunk.tensor.nbytes
        assert set(found.meta.vectors) == {"prompt", "vision"}
        for name, vector in chunk.meta.vectors.items():
            assert found.meta.vectors[name].dtype == np.float32
            np.testing.assert_array_equal(found.meta.vectors[name], vector)

    @pytest.mark.parametrize("shape", [(2, 1, 1, 0, 4), (1,), (3, 5), (2, 2, 3, 7, 5)])
    def test_any_shape_comes_back(self, store: Store, shape: tuple[int, ...]) -> None:
        data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        chunk = Chunk(make_chunk().meta, Tensor(data, "F32"))
        assert store.put(chunk)
        found = store.get(chunk.meta.id)
        assert found is not None
        assert same_bits(found.tensor, chunk.tensor)

    def test_a_strided_tensor_is_stored_in_order(self, store: Store) -> None:
        data = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
        chunk = Chunk(make_chunk().meta, Tensor(data, "F32"))
        assert store.put(chunk)
        found = store.get(chunk.meta.id)
        assert found is not None
        np.testing.assert_array_equal(found.tensor.data, data)

    def test_what_is_loaded_cannot_be_written_to_and_is_nobody_elses(self, store: Store) -> None:
        data = np.ones((2, 1, 1, 300, 2), dtype=np.float32)
        chunk = Chunk(make_chunk().meta, Tensor(data, "F32"))
        assert store.put(chunk)
        data[:] = 7
        found = store.get(chunk.meta.id)
        assert found is not None
        assert not found.tensor.data.flags.writeable
        assert found.tensor.data.max() == 1

    def test_what_is_missing_is_a_counted_miss(self, store: Store) -> None:
        assert store.get("0" * 40) is None
        assert store.meta("0" * 40) is None
        assert store.delete("0" * 40) is False
        assert store.stats().misses == 1

    def test_another_epoch_finds_nothing(self, store: Store) -> None:
        store.put(make_chunk(epoch="weights-1"))
        assert store.get(make_chunk(epoch="weights-2").meta.id) is None
        assert list(store.metas(epoch="weights-2")) == []
        assert len(list(store.metas(epoch="weights-1"))) == 1

    def test_partitions_do_not_see_each_other(self, store: Store) -> None:
        mine, theirs = make_chunk(1, partition="a"), make_chunk(1, partition="b")
        assert store.put(mine)
        assert store.put(theirs)
        store.get(mine.meta.id)
        assert mine.meta.id != theirs.meta.id
        assert [meta.id for meta in store.metas("a")] == [mine.meta.id]
        a, b, nobody = store.stats("a"), store.stats("b"), store.stats("c")
        assert (a.entries, a.hits, a.puts) == (1, 1, 1)
        assert (b.entries, b.hits, b.puts) == (1, 0, 1)
        assert (nobody.entries, nobody.bytes, nobody.hits, nobody.puts) == (0, 0, 0, 0)
        assert store.stats().entries == 2
        assert store.clear("a") == 1
        assert store.get(mine.meta.id) is None
        assert store.get(theirs.meta.id) is not None

    def test_delete_and_clear_take_out_and_tell(self, store: Store) -> None:
        gone: list[str] = []
        store.on_evict(gone.append)
        chunks = [make_chunk(number) for number in range(3)]
        for chunk in chunks:
            store.put(chunk)
        assert store.delete(chunks[0].meta.id) is True
        assert store.delete(chunks[0].meta.id) is False
        assert store.clear() == 2
        assert sorted(gone) == sorted(chunk.meta.id for chunk in chunks)
        stats = store.stats()
        assert (stats.entries, stats.bytes) == (0, 0)
        assert sum(stats.evictions.values()) == 0

    def test_a_listener_that_fails_disturbs_nobody(self, store: Store) -> None:
        told: list[str] = []

        def fail(_: str) -> None:
            raise RuntimeError("listener")

        store.on_evict(fail)
        store.on_evict(told.append)
        chunk = make_chunk()
        store.put(chunk)
        assert store.delete(chunk.meta.id)
        assert told == [chunk.meta.id]

    def test_a_second_put_replaces(self, store: Store) -> None:
        gone: list[str] = []
        store.on_evict(gone.append)
        first, second = make_chunk(1, seed=10), make_chunk(1, seed=11)
        store.put(first)
        held = store.stats().bytes
        assert store.put(second)
        found = store.get(first.meta.id)
        assert found is not None
        assert same_bits(found.tensor, second.tensor)
        assert abs(store.stats().bytes - held) <= 8
        assert store.stats().entries == 1
        assert gone == []

    def test_max_entries_evicts_the_least_recently_used(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store", max_entries=3)
        gone: list[str] = []
        store.on_evict(gone.append)
        chunks = [make_chunk(number) for number in range(4)]
        for chunk in chunks[:3]:
            store.put(chunk)
        store.get(chunks[0].meta.id)
        assert store.put(chunks[3])
        assert gone == [chunks[1].meta.id]
        assert {meta.id for meta in store.metas()} == {chunks[number].meta.id for number in (0, 2, 3)}
        assert store.stats().evictions == {"entries": 1}
        store.close()

    def test_lfu_evicts_the_least_often_used(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store", max_entries=3, policy="lfu")
        chunks = [make_chunk(number) for number in range(4)]
        for chunk in chunks[:3]:
            store.put(chunk)
        for number in (0, 0, 0, 1, 1, 2):
            store.get(chunks[number].meta.id)
        store.put(chunks[3])
        assert {meta.id for meta in store.metas()} == {chunks[number].meta.id for number in (0, 1, 3)}
        store.close()

    @pytest.mark.parametrize("limit", ["max_entries", "max_bytes"])
    def test_lfu_counts_the_uses_of_an_entry_that_is_put_again(self, tmp_path: Path, limit: str) -> None:
        probe = self.make_store(tmp_path / "probe")
        most = 3 if limit == "max_entries" else 3 * size_in(probe, make_chunk(0)) + 512
        probe.close()
        store = self.make_store(tmp_path / "store", policy="lfu", **{limit: most})
        chunks = [make_chunk(number) for number in range(4)]
        for chunk in chunks[:3]:
            store.put(chunk)
        for number in (0, 0, 0, 0, 1, 1, 2, 2):
            store.get(chunks[number].meta.id)
        assert store.put(make_chunk(0, seed=9))
        assert store.put(chunks[3])
        assert store.get(chunks[0].meta.id) is not None, "it was used most"
        store.close()

    def test_max_bytes_holds_and_evicts_as_many_as_it_takes(self, tmp_path: Path) -> None:
        probe = self.make_store(tmp_path / "probe")
        small, large = make_chunk(0, nbytes=4096), make_chunk(9, nbytes=12000)
        size, large_size = size_in(probe, small), size_in(probe, large)
        probe.close()
        store = self.make_store(tmp_path / "store", max_bytes=4 * size + 1024)
        for number in range(4):
            assert store.put(make_chunk(number, nbytes=4096))
        assert store.stats().entries == 4
        assert store.put(large)
        assert store.stats().bytes <= 4 * size + 1024
        assert store.get(large.meta.id) is not None
        expected = -(-(large_size - 1024) // size)
        assert store.stats().evictions == {"bytes": expected}
        assert store.get(make_chunk(3).meta.id) is not None
        store.close()

    def test_what_is_larger_than_the_budget_is_refused_and_evicts_nothing(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store", max_bytes=20_000)
        kept = make_chunk(1)
        assert store.put(kept)
        assert store.put(make_chunk(2, nbytes=40_000)) is False
        assert store.put(make_chunk(1, nbytes=40_000)) is False
        assert store.get(kept.meta.id) is not None
        assert store.stats("p").refused == {"too_large": 2}
        store.close()

    def test_what_cannot_be_a_tensor_is_refused(self, store: Store) -> None:
        wrong = Chunk(make_chunk().meta, Tensor(np.zeros(4, dtype=np.float64), "F32"))
        unknown = Chunk(make_chunk().meta, Tensor(np.zeros(4, dtype=np.float32), "Q4"))
        assert store.put(wrong) is False
        assert store.put(unknown) is False
        assert store.stats().refused == {"invalid": 2}
        assert store.stats().entries == 0

    def test_threads_share_a_store(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store", max_entries=8)
        chunks = [make_chunk(number) for number in range(16)]
        wrong: list[object] = []

        def work(offset: int) -> None:
            try:
                for step in range(30):
                    chunk = chunks[(offset * 5 + step) % len(chunks)]
                    store.put(chunk)
                    found = store.get(chunks[(offset + step * 3) % len(chunks)].meta.id)
                    if found is not None and not same_bits(found.tensor, chunks[found.meta.token_ids[0]].tensor):
                        wrong.append(found.meta.id)
                    if step % 7 == 0:
                        store.delete(chunk.meta.id)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.stats().entries <= 8
        assert store.stats().corrupt == 0
        assert len(list(store.metas())) == store.stats().entries
        store.close()


class PersistentStoreTests(StoreTests):
    """Also: a store that is opened again has what the closed one had."""

    def test_it_is_there_after_a_restart(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "store")
        chunks = [make_chunk(number, vectors={"text": np.full(3, number, np.float32)}) for number in range(3)]
        for chunk in chunks:
            store.put(chunk)
        store.flush()
        store.close()
        again = self.make_store(tmp_path / "store", max_entries=2)
        metas = {meta.id: meta for meta in again.metas()}
        assert chunks[2].meta.id in metas
        for chunk in chunks:
            if chunk.meta.id in metas:
                found = again.get(chunk.meta.id)
                assert found is not None
                assert same_bits(found.tensor, chunk.tensor)
                np.testing.assert_array_equal(metas[chunk.meta.id].vectors["text"], chunk.meta.vectors["text"])
        again.close()
