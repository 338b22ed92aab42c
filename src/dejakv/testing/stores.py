"""Conformance suite of stores. Subclass it, override `make_store`, and let pytest collect it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.identity import MediumSpan
from dejakv.store.base import NUMPY_DTYPES, RawTensor, StoredState
from dejakv.store.budgets import now
from dejakv.store.store import Store
from dejakv.testing.stored_states import (
    PREAMBLE,
    check_whole,
    ids,
    make_prompt_state,
    make_stored_state,
    same_bits,
)

LONG = tuple(range(1000, 2000))
TURNS = [LONG[: 400 + 50 * turn] for turn in range(13)]
BRANCHES = [(*LONG[:500], *range(first, first + 40)) for first in range(100, 900, 100)]


class AheadClock:
    """Clock that a test sets some seconds ahead of the real one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the time, in seconds since 1970."""
        return now() + self.seconds


def watch_evictions(store: Store) -> list[str]:
    """Return a list to which the ids of evicted entries are added from now on."""
    evicted_ids: list[str] = []
    store.listen(removed=evicted_ids.append)
    return evicted_ids


class StoreTests:
    """Tests of every `dejakv.store.Store`, wherever its bytes are."""

    def make_store(self, folder: Path, **settings: Any) -> Store:
        """Make a store with these settings of `open_store`; the same folder is the same store."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> AheadClock:
        """Return the clock of `store`."""
        return AheadClock()

    @pytest.fixture
    def store(self, tmp_path: Path, clock: AheadClock) -> Iterator[Store]:
        """Yield an empty store."""
        with closing(self.make_store(tmp_path / "store", clock=clock, background=False)) as store:
            yield store

    @pytest.mark.parametrize("dtype", NUMPY_DTYPES)
    def test_a_state_comes_back_as_it_went_in(self, store: Store, dtype: str) -> None:
        """Check every field of a stored state, and its bits, for each type."""
        vectors = {
            "prompt": np.linspace(-1, 1, 7, dtype=np.float32),
            "vision": np.zeros(0, np.float32),
        }
        about = {"image": "x.png", "n": 3, "nested": {"a": [1, None]}}
        spans = (MediumSpan(2, 4, "ab" * 32),)
        more = {
            "spans": spans,
            "embedder": "embedder-1",
            "answer": "Blue.\n",
            "created": 123.5,
            "metadata": about,
        }
        stored_state = make_stored_state(dtype=dtype, vectors=vectors, **more)
        assert store.put(stored_state) is True
        loaded = store.get(stored_state.meta.id)
        assert loaded is not None
        assert same_bits(loaded.tensor, stored_state.tensor)
        assert loaded.tensor.data.dtype == stored_state.tensor.data.dtype
        assert replace(loaded.meta, vectors={}) == replace(
            stored_state.meta, vectors={}, nbytes=stored_state.tensor.nbytes
        )
        assert set(loaded.meta.vectors) == set(vectors)

        for name, vector in vectors.items():
            assert loaded.meta.vectors[name].dtype == np.float32
            np.testing.assert_array_equal(loaded.meta.vectors[name], vector)

    @pytest.mark.parametrize("shape", [(2, 1, 1, 0, 4), (1,), (3, 5), (2, 2, 3, 7, 5)])
    def test_any_shape_comes_back_in_order(self, store: Store, shape: tuple[int, ...]) -> None:
        """Check shapes without rows, and arrays that are not contiguous."""
        data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        # The transposed one has its elements in another order in memory.
        for array in (data, data.T):
            stored_state = StoredState(make_stored_state().meta, RawTensor(array, "F32"))
            assert store.put(stored_state)
            check_whole(store, [stored_state])

    def test_what_is_loaded_cannot_be_written_to_and_is_nobody_elses(self, store: Store) -> None:
        """Check that stored bytes share no memory with a caller's array."""
        data = np.ones((2, 1, 1, 300, 2), dtype=np.float32)
        stored_state = StoredState(make_stored_state().meta, RawTensor(data, "F32"))
        assert store.put(stored_state)
        # The caller's array may be reused as soon as `put` returns.
        data[:] = 7
        loaded = store.get(stored_state.meta.id)
        assert loaded is not None

        assert not loaded.tensor.data.flags.writeable
        assert loaded.tensor.data.max() == 1

    def test_what_cannot_be_a_tensor_is_refused(self, store: Store) -> None:
        """Check the refusal of unknown types, and of arrays of another type than declared."""
        wrong = StoredState(
            make_stored_state().meta, RawTensor(np.zeros(4, dtype=np.float64), "F32")
        )
        unknown = StoredState(
            make_stored_state().meta, RawTensor(np.zeros(4, dtype=np.float32), "Q4")
        )
        assert not store.put(wrong)
        assert not store.put(unknown)
        assert (store.stats().refused, store.stats().entries) == ({"invalid": 2}, 0)

    def test_what_is_missing_is_a_counted_miss(self, store: Store) -> None:
        """Check that an unknown id gives None or False, and that `get` counts a miss."""
        assert store.get("0" * 40) is None
        assert store.meta("0" * 40) is None
        assert store.delete("0" * 40) is False
        assert store.stats().misses == 1

    def test_partitions_and_epochs_do_not_see_each_other(self, store: Store) -> None:
        """Check isolation in lookups, lists, figures and clearing."""
        first_tenant, second_tenant, later = (
            make_prompt_state(LONG[:100], partition=p, epoch=e) for p, e in ("ae", "be", "af")
        )
        assert len({first_tenant.meta.id, second_tenant.meta.id, later.meta.id}) == 3

        for stored_state in (second_tenant, later):
            assert store.put(stored_state)
        assert store.get(first_tenant.meta.id) is None
        assert store.find("a", "e", LONG[:100]) is None
        assert store.find("ae", "", LONG[:100]) is None
        assert store.find("a", "f", LONG[:100]) is not None
        assert [meta.id for meta in store.metas("b")] == [second_tenant.meta.id]
        assert [meta.id for meta in store.metas(epoch="f")] == [later.meta.id]
        assert store.put(first_tenant)
        check_whole(store, [first_tenant, later])
        a, b, nobody = store.stats("a"), store.stats("b"), store.stats("c")
        assert (a.entries, a.hits, a.puts) == (2, 2, 2)
        assert (b.entries, b.hits, b.puts) == (1, 0, 1)
        assert (nobody.entries, nobody.bytes, nobody.hits, nobody.puts) == (0, 0, 0, 0)
        assert store.stats().entries == 3

        assert store.clear("a") == 2
        assert store.get(first_tenant.meta.id) is None
        check_whole(store, [second_tenant])

    def test_delete_and_clear_take_out_and_tell(self, store: Store) -> None:
        """Check that deleted and cleared entries are gone, and that listeners are told of each."""

        def fail(_: str) -> None:
            raise RuntimeError("a listener that fails disturbs nobody")

        # Before the listener that counts, so that its error would hide the removals.
        store.listen(removed=fail)
        evicted_ids = watch_evictions(store)
        stored_states = [make_stored_state(number) for number in range(3)]
        for stored_state in stored_states:
            store.put(stored_state)

        assert store.delete(stored_states[0].meta.id) is True
        assert store.delete(stored_states[0].meta.id) is False
        assert store.clear() == 2
        assert sorted(evicted_ids) == sorted(stored_state.meta.id for stored_state in stored_states)
        stats = store.stats()
        assert (stats.entries, stats.bytes, sum(stats.evictions.values())) == (0, 0, 0)

    def test_a_second_put_replaces(self, store: Store) -> None:
        """Check that a put of the same id replaces the entry."""
        evicted_ids = watch_evictions(store)
        first, second = make_stored_state(1, seed=10), make_stored_state(1, seed=11)
        assert store.put(first)
        first_bytes = store.stats().bytes
        assert store.put(second)
        check_whole(store, [second])

        # Nothing of the first is left; headers may differ by some digits.
        assert abs(store.stats().bytes - first_bytes) <= 8
        assert (store.stats().entries, evicted_ids) == (1, [])

    def size(self, folder: Path, stored_state: StoredState) -> int:
        """Return the bytes of a stored state by the count of an empty store."""
        with closing(self.make_store(folder)) as store:
            assert store.put(stored_state)
            stored_bytes = store.stats().bytes
            assert store.delete(stored_state.meta.id)
            return stored_bytes

    def test_max_bytes_holds_and_evicts_as_many_as_it_takes(self, tmp_path: Path) -> None:
        """Check the budget in bytes: refusals, and the number of evictions."""
        small, large = make_stored_state(0, nbytes=4096), make_stored_state(9, nbytes=12000)
        size, large_size = (
            self.size(tmp_path / "probe", small),
            self.size(tmp_path / "probe", large),
        )
        with closing(self.make_store(tmp_path / "store", max_bytes=4 * size + 1024)) as store:
            for number in range(4):
                assert store.put(make_stored_state(number, nbytes=4096))

            # An entry larger than the budget evicts nothing, whether its id is known or new.
            for number in (3, 5):
                assert store.put(make_stored_state(number, nbytes=40_000)) is False
            assert (store.stats().entries, store.stats("p").refused) == (4, {"too_large": 2})
            assert store.put(large)
            assert store.stats().bytes <= 4 * size + 1024
            # As many as make room for the large one, whose first 1,024 bytes are slack.
            assert store.stats().evictions == {"bytes": -(-(large_size - 1024) // size)}
            check_whole(store, [large, make_stored_state(3, nbytes=4096)])

    def test_threads_share_a_store(self, tmp_path: Path) -> None:
        """Check that concurrent puts, gets and deletes give whole entries within the budget."""
        stored_states = [make_stored_state(number) for number in range(16)]
        with closing(self.make_store(tmp_path / "store", max_entries=8)) as store:

            def work(offset: int) -> None:
                for step in range(30):
                    stored_state = stored_states[(offset * 5 + step) % len(stored_states)]
                    store.put(stored_state)
                    loaded = store.get(
                        stored_states[(offset + step * 3) % len(stored_states)].meta.id
                    )
                    # Deleted or evicted at any time, but never mixed with another entry.
                    assert loaded is None or same_bits(
                        loaded.tensor, stored_states[loaded.meta.token_ids[0]].tensor
                    )
                    if step % 7 == 0:
                        store.delete(stored_state.meta.id)

            with ThreadPoolExecutor(4) as threads:
                for done in [threads.submit(work, number) for number in range(4)]:
                    done.result()

            assert len(ids(store)) == store.stats().entries <= 8
            assert store.stats().corrupt == 0

    @pytest.mark.parametrize(
        ("prompts", "again"), [(TURNS, 0), (BRANCHES, 15)], ids=["turns", "branches"]
    )
    def test_what_prompts_begin_with_alike_is_stored_once(
        self, store: Store, prompts: list[tuple[int, ...]], again: int
    ) -> None:
        """Check that common prefixes take the room of one."""
        stored_states = [make_prompt_state(tokens, width=256) for tokens in prompts]
        for stored_state in stored_states:
            assert store.put(stored_state)

        check_whole(store, stored_states)
        rows = len(set().union(*prompts)) + again * len(prompts)
        row = stored_states[0].tensor.nbytes // stored_states[0].meta.num_tokens
        # 3% for headers of objects; token ids and a row of the catalog for each prompt.
        assert store.stats().bytes < 1.03 * row * rows + sum(
            8 * len(tokens) + 1000 for tokens in prompts
        )
        assert (store.stats().entries, store.stats().puts, store.stats().hits) == (
            len(prompts),
        ) * 3

    def test_the_parts_that_hold_the_rows_are_read_as_they_are_held(self, store: Store) -> None:
        """Check that `get_parts` reads the stored parts with the rows, and few others."""
        whole = make_prompt_state(LONG)
        assert store.put(whole)
        for rows in ([(0, 5)], [(300, 310), (900, 905)], [(0, 1000)]):
            parts = store.get_parts(whole.meta.id, rows)
            assert parts is not None
            assert all(lower.stop <= upper.first for lower, upper in pairwise(parts))
            row_numbers = {row for part in parts for row in range(part.first, part.stop)}
            assert row_numbers >= {row for start, stop in rows for row in range(start, stop)}
            # A segment has at most 256 tokens, and only those with wanted rows are read.
            assert len(row_numbers) <= 256 * len(rows) or rows == [(0, 1000)]
            for part in parts:
                np.testing.assert_array_equal(
                    part.tensor.data, whole.tensor.data[:, :, :, part.first : part.stop]
                )

        assert store.get_parts("0" * 40, [(0, 1)]) is None
        assert (store.stats().hits, store.stats().misses) == (3, 1)


class PersistentStoreTests(StoreTests):
    """Tests of stores that outlive their process: content and time go on."""

    def test_it_is_there_after_a_restart(self, tmp_path: Path, clock: AheadClock) -> None:
        """Check content, expiry and a smaller budget after a restart."""
        stored_states = [
            make_stored_state(number, vectors={"text": np.full(3, number, np.float32)})
            for number in range(3)
        ]
        brief = make_prompt_state((*PREAMBLE, 1), created=now(), ttl=60.0)
        with closing(self.make_store(tmp_path / "store", clock=clock, background=False)) as store:
            for stored_state in (*stored_states, brief):
                store.put(stored_state)
            store.flush()

        # Past the lifetime of `brief`, while nobody had the store open.
        clock.seconds = 61
        with closing(
            self.make_store(tmp_path / "store", clock=clock, background=False, max_entries=2)
        ) as again:
            assert again.get(brief.meta.id) is None
            assert again.sweep() == 0, "it left when the folder was opened"
            metas = {meta.id: meta for meta in again.metas()}
            survivors = [
                stored_state for stored_state in stored_states if stored_state.meta.id in metas
            ]
            assert stored_states[2] in survivors
            check_whole(again, survivors)
            for stored_state in survivors:
                np.testing.assert_array_equal(
                    metas[stored_state.meta.id].vectors["text"], stored_state.meta.vectors["text"]
                )
