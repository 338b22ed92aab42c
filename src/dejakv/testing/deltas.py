"""The conformance suite of a `DeltaStore` over any store that knows parents."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejakv.identity import Span
from dejakv.store.base import NODE, Chunk, Store
from dejakv.store.deltas import DeltaStore
from dejakv.store.donors import load_beginning
from dejakv.store.parts import joined
from dejakv.testing.chunks import same_bits
from dejakv.testing.parents import ParentsTests
from dejakv.testing.prompts import PREAMBLE, check_whole, ids, part, prompt_chunk, told_by, turns


class DeltasTests(ParentsTests):
    """Subclass it with the `make_store` of the store below."""

    @pytest.fixture
    def deltas(self, store: Store) -> DeltaStore:
        return DeltaStore(store)

    def test_a_conversation_longer_than_the_budget_of_entries_is_stored(self, tmp_path: Path) -> None:
        store = DeltaStore(self.make_store(tmp_path / "store", max_entries=3))
        told = told_by(store)
        chunks = turns(8)
        for chunk in chunks:
            assert store.put(chunk)
        check_whole(store, chunks[5:])
        assert ids(store) == {chunk.meta.id for chunk in chunks[5:]}
        assert store.stats().entries == 3
        assert set(told) == {chunk.meta.id for chunk in chunks[:5]}
        store.close()

    def test_turns_take_the_bytes_of_their_distinct_tokens(self, deltas: DeltaStore) -> None:
        chunks = turns(12)
        for chunk in chunks:
            assert deltas.put(chunk)
        check_whole(deltas, chunks)
        tensors = sum(meta.nbytes for meta in deltas.inner.metas())
        assert tensors == chunks[-1].tensor.nbytes
        stats = deltas.stats()
        assert (stats.entries, stats.puts, stats.hits) == (12, 12, 12)

    def test_what_prompts_begin_with_alike_is_split_off(self, deltas: DeltaStore) -> None:
        chunks = [prompt_chunk((*PREAMBLE, *range(first, first + 20))) for first in (100, 200, 300)]
        told = told_by(deltas)
        for chunk in chunks:
            assert deltas.put(chunk)
        check_whole(deltas, chunks)
        row = chunks[0].tensor.nbytes // 60
        assert sum(meta.nbytes for meta in deltas.inner.metas()) == row * (40 + 3 * 20)
        assert ids(deltas) == {chunk.meta.id for chunk in chunks}, "the node is no prompt"
        (node,) = (meta for meta in deltas.inner.metas() if meta.kind == NODE)
        assert (deltas.meta(node.id), deltas.get(node.id), deltas.delete(node.id)) == (None, None, False)
        assert node.id == prompt_chunk(PREAMBLE).meta.id
        assert told == []
        whole = prompt_chunk(PREAMBLE)
        assert deltas.put(whole), "a node that comes as a prompt"
        check_whole(deltas, [whole, *chunks])
        assert deltas.delete(whole.meta.id)
        check_whole(deltas, chunks)
        assert deltas.clear() == 3
        assert (list(deltas.inner.metas()), deltas.inner.stats().bytes) == ([], 0)

    def test_a_prompt_that_a_longer_one_begins_with(self, deltas: DeltaStore) -> None:
        longer, shorter = prompt_chunk((*PREAMBLE, *range(30))), prompt_chunk((*PREAMBLE, *range(10)))
        assert deltas.put(longer)
        assert deltas.put(shorter)
        check_whole(deltas, [longer, shorter])
        assert sum(meta.nbytes for meta in deltas.inner.metas()) == longer.tensor.nbytes
        assert deltas.delete(longer.meta.id)
        check_whole(deltas, [shorter])

    def test_no_medium_is_split_and_none_is_shared_with_another(self, deltas: DeltaStore) -> None:
        tokens = (*PREAMBLE, *([9] * 30), 1, 2, 3)
        pictures = [(Span(40, 30, digest * 32),) for digest in ("ab", "cd")]
        chunks = [prompt_chunk(tokens, spans=spans) for spans in pictures]
        cropped = prompt_chunk(tokens[:55], spans=(Span(40, 15, "ab" * 32),))
        for chunk in (*chunks, cropped):
            assert deltas.put(chunk)
        check_whole(deltas, [*chunks, cropped])
        nodes = [meta for meta in deltas.inner.metas() if meta.kind == NODE]
        assert [(node.num_tokens, node.spans) for node in nodes] == [(40, ())]

    def test_partitions_and_epochs_share_nothing(self, deltas: DeltaStore) -> None:
        places = [("p", "e"), ("q", "e"), ("p", "f")]
        chunks = [prompt_chunk(PREAMBLE, partition=one, epoch=other) for one, other in places]
        longer = [prompt_chunk((*PREAMBLE, 1, 2), partition=one, epoch=other) for one, other in places]
        for chunk in (*chunks, *longer):
            assert deltas.put(chunk)
        for meta in deltas.metas():
            parent = deltas.meta(meta.parent) if meta.parent else meta
            assert parent is not None
            assert (parent.partition, parent.epoch) == (meta.partition, meta.epoch)
        assert deltas.clear("p") == 4
        check_whole(deltas, [chunks[1], longer[1]])

    def test_what_is_not_exact_is_kept_whole(self, deltas: DeltaStore) -> None:
        exact = prompt_chunk((*PREAMBLE, *range(20)))
        others = [
            prompt_chunk((*PREAMBLE, *range(30, 50)), kind="rows"),
            prompt_chunk((*PREAMBLE, *range(60, 80)), generation=1),
            prompt_chunk((*PREAMBLE, *range(90, 110)), position=5),
        ]
        for chunk in (exact, *others):
            assert deltas.put(chunk)
        assert [meta.parent for meta in deltas.inner.metas()] == [""] * 4
        assert deltas.put(prompt_chunk((*PREAMBLE, *range(30, 55)))), "never below what is not exact"
        for chunk in others:
            found = deltas.get(chunk.meta.id)
            assert found is not None
            assert same_bits(found.tensor, chunk.tensor)

    def test_parts_of_prompts_are_refused_from_outside(self, deltas: DeltaStore) -> None:
        first, second = turns(2)
        assert deltas.put(first)
        for wrong in (part(second, first), part(second, tokens=20, node=True)):
            assert deltas.put(wrong) is False
        assert deltas.put(Chunk(second.meta, second.tensor, [(0, 5)])) is False
        assert deltas.stats("p").refused == {"invalid": 3}

    def test_the_parts_that_hold_the_rows_are_read_and_no_others(self, deltas: DeltaStore) -> None:
        chunks = turns(6)
        for chunk in chunks:
            assert deltas.put(chunk)
        whole = chunks[-1]
        read: list[str] = []
        load = deltas.inner.get
        deltas.inner.get = lambda id: (read.append(id), load(id))[1]  # type: ignore[method-assign]
        begun = load_beginning(deltas, whole.meta, 70)
        assert begun is not None
        assert read == [chunks[0].meta.id, chunks[1].meta.id], "only what holds some of the rows"
        assert (begun.meta, begun.rows) == (whole.meta, [(0, 70)])
        np.testing.assert_array_equal(begun.tensor.data[:, :, :, :70], whole.tensor.data[:, :, :, :70])
        assert deltas.put(begun) is False, "it is no whole prompt"
        read.clear()
        parts = deltas.get_parts(whole.meta.id, [(30, 45), (121, 125)])
        assert parts is not None
        assert read == [part.meta.id for part in parts] == [chunks[0].meta.id, chunks[4].meta.id]
        for start, stop in ((30, 45), (121, 125)):
            (found,) = [rows for part in parts if (rows := joined([part], start, stop)) is not None]
            np.testing.assert_array_equal(found.data, whole.tensor.data[:, :, :, start:stop])
        assert deltas.stats().hits == 2
        assert load_beginning(deltas, replace(whole.meta, id="0" * 40), 1) is None

    def test_rows_are_handed_out_in_the_parts_that_hold_them(self, deltas: DeltaStore) -> None:
        chunks = turns(4)
        for chunk in chunks:
            assert deltas.put(chunk)
        whole = chunks[-1]
        for rows in ([(0, 5)], [(30, 45), (75, 80)], [(0, whole.meta.num_tokens)]):
            parts = deltas.get_parts(whole.meta.id, rows)
            assert parts is not None
            held = [range(own.meta.rows_from, own.meta.rows_from + own.tensor.shape[3]) for own in parts]
            for start, stop in rows:
                assert set(range(start, stop)) <= {row for own in held for row in own}
            for piece, own in zip(parts, held, strict=True):
                np.testing.assert_array_equal(piece.tensor.data, whole.tensor.data[:, :, :, own.start : own.stop])
        alone = deltas.get_parts(chunks[0].meta.id, [(0, 5)])
        assert alone is not None
        assert [own.meta.id for own in alone] == [chunks[0].meta.id]
        assert deltas.get_parts("0" * 40, [(0, 1)]) is None
        stats = deltas.stats()
        assert (stats.hits, stats.misses) == (4, 1)

    def test_a_parent_that_is_gone_costs_those_that_need_it(self, deltas: DeltaStore) -> None:
        first, second, third = turns(3)
        other = prompt_chunk(range(60))
        for chunk in (first, second, third, other):
            assert deltas.put(chunk)
        told = told_by(deltas)
        deltas.discard(second.meta.id)
        assert deltas.get(third.meta.id) is None
        assert deltas.get(second.meta.id) is None
        assert set(told) == {second.meta.id, third.meta.id}
        check_whole(deltas, [first, other])
        assert deltas.put(third)
        check_whole(deltas, [first, third])
