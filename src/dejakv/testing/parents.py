"""The conformance suite of stores that know parents. Subclass `ParentsTests`, override `make_store`, and let pytest collect it.

`deltas.DeltasTests` has these tests too, and those of the store without duplicates around such a store.
"""

from pathlib import Path

import numpy as np
import pytest

from dejakv.store.base import KV, NODE, Parents, Store
from dejakv.store.deltas import DeltaStore
from dejakv.testing.made_store import MadeStore
from dejakv.testing.prompts import check_whole, ids, part, prompt_chunk, told_by, turns


class ParentsTests(MadeStore):
    """What every store must do that keeps chunks for a `DeltaStore`."""

    def test_it_knows_parents(self, store: Store) -> None:
        assert isinstance(store, Parents)

    def test_a_part_comes_back_as_it_went_in(self, store: Store) -> None:
        first, second = turns(2)
        delta = part(second, first)
        assert store.put(first)
        assert store.put(delta)
        found = store.get(second.meta.id)
        assert found is not None
        assert (found.meta.parent, found.meta.rows_from) == (first.meta.id, first.meta.num_tokens)
        assert found.tensor.data.tobytes() == np.ascontiguousarray(delta.tensor.data).tobytes()
        assert found.meta.nbytes == delta.tensor.nbytes

    def test_a_part_without_its_parent_is_refused(self, store: Store) -> None:
        first, second = turns(2)
        assert store.put(part(second, first)) is False
        assert store.stats("p").refused == {"parent": 1}
        other = prompt_chunk(first.meta.token_ids, partition="q")
        assert store.put(other)
        foreign = part(second, other)
        assert store.put(foreign) is False, "a parent of another partition"
        assert store.stats().entries == 1

    def test_a_prompt_with_children_that_is_deleted_becomes_a_node(self, store: Store) -> None:
        first, second, third = turns(3)
        for chunk, parent in ((first, None), (second, first), (third, second)):
            assert store.put(part(chunk, parent))
        told = told_by(store)
        assert store.delete(first.meta.id) is True
        assert told == [first.meta.id]
        node = store.meta(first.meta.id)
        assert node is not None
        assert (node.kind, node.prompt, node.chunk, node.answer, dict(node.vectors)) == (NODE, "", "", None, {})
        assert node.token_ids == first.meta.token_ids
        assert store.delete(first.meta.id) is False
        assert (store.stats().entries, store.stats("p").entries) == (2, 2)
        assert store.delete(third.meta.id) is True
        assert store.meta(first.meta.id) is not None
        assert store.delete(second.meta.id) is True
        assert store.meta(first.meta.id) is None, "a node goes with its last child"
        assert set(told) == {first.meta.id, second.meta.id, third.meta.id}
        assert (store.stats().entries, store.stats().bytes) == (0, 0)

    def test_a_replaced_prompt_keeps_its_children(self, store: Store) -> None:
        first, second = turns(2)
        assert store.put(first)
        assert store.put(part(second, first))
        told = told_by(store)
        assert store.put(first)
        assert told == []
        assert store.delete(first.meta.id)
        assert store.put(first), "a node becomes a prompt again"
        found = store.meta(first.meta.id)
        assert found is not None
        assert found.kind == KV
        assert store.delete(second.meta.id)
        assert ids(store) == {first.meta.id}
        assert store.stats().entries == 1

    def test_a_split_is_all_or_nothing(self, store: Store) -> None:
        (held,) = turns(1)
        assert store.put(held)
        before = store.stats().bytes
        told = told_by(store)
        node = part(held, tokens=40, node=True)
        assert isinstance(store, Parents)
        assert store.split(node, part(held, node)) is True
        assert told == []
        assert (store.stats().entries, store.stats("p").entries) == (1, 1)
        assert store.stats().bytes < before + 3000
        assert store.split(node, part(held, node)) is False, "the node is there"
        again = part(held, tokens=50, node=True)
        assert store.split(again, part(held, again)) is False, "it has another parent"
        assert store.meta(again.meta.id) is None
        gone = prompt_chunk(range(40))
        upper = part(gone, tokens=20, node=True)
        assert store.split(upper, part(gone, upper)) is False, "it is not there"
        assert store.meta(upper.meta.id) is None
        check_whole(DeltaStore(store), [held])
        assert store.delete(held.meta.id)
        assert (ids(store), store.stats().bytes) == (set(), 0)

    def test_what_is_discarded_takes_all_that_need_it_and_no_other(self, store: Store) -> None:
        first, second, third = turns(3)
        other = prompt_chunk((*first.meta.token_ids, *range(5000, 5020)))
        for chunk, parent in ((first, None), (second, first), (third, second), (other, first)):
            assert store.put(part(chunk, parent))
        told = told_by(store)
        assert isinstance(store, Parents)
        store.discard(second.meta.id)
        assert ids(store) == {first.meta.id, other.meta.id}
        assert set(told) == {second.meta.id, third.meta.id}
        store.delete(first.meta.id)
        store.discard(other.meta.id)
        assert ids(store) == set()
        assert store.stats().bytes == 0

    @pytest.mark.parametrize("limit", ["max_entries", "max_bytes"])
    def test_children_are_evicted_before_their_parents(self, tmp_path: Path, limit: str) -> None:
        chunks = turns(3)
        chain = list(zip(chunks, [None, *chunks], strict=False))
        free = self.make_store(tmp_path / "free")
        for chunk, parent in chain:
            assert free.put(part(chunk, parent))
        room = free.stats().bytes if limit == "max_bytes" else 3
        free.close()
        store = self.make_store(tmp_path / "store", **{limit: room})
        told = told_by(store)
        for chunk, parent in chain:
            assert store.put(part(chunk, parent))
        store.get(chunks[2].meta.id)  # the child is used last, and still goes first
        assert store.put(prompt_chunk(range(7000, 7018)))
        assert told == [chunks[2].meta.id]
        assert store.stats().evictions == {limit[4:]: 1}
        check_whole(DeltaStore(store), chunks[:2])
        store.close()
