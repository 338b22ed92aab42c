"""The rows of a prompt that are needed, from a store that hands out parts and from one that does not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejakv.store.base import Chunk, Rows, Store, Tensor
from dejakv.store.codec import CorruptChunk
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.donors import load_beginning, load_parts
from dejakv.store.memory import MemoryStore
from dejakv.store.parts import joined
from dejakv.testing.chunks import same_bits
from dejakv.testing.prompts import prompt_chunk, turns

CHUNKS = turns(4)
"""A conversation: the preamble and the first turn are 60 tokens, each further turn has 20."""
LAST = CHUNKS[-1]
TOKENS = LAST.meta.num_tokens


def filled(store: Store) -> Store:
    for chunk in CHUNKS:
        assert store.put(chunk)
    return store


def parts_of(store: Store) -> list[Chunk]:
    parts = load_parts(store, LAST.meta.id, [(0, TOKENS)])
    assert parts is not None
    return list(parts)


@pytest.mark.parametrize("tokens", [1, 59, 60, 61, 119])
def test_a_beginning_is_the_prompts_first_rows(tmp_path: Path, tokens: int) -> None:
    for store in (DeltaStore(MemoryStore()), DeltaStore(DiskStore(tmp_path / "d")), MemoryStore()):
        begun = load_beginning(filled(store), LAST.meta, tokens)
        assert begun is not None
        assert begun.meta == LAST.meta
        np.testing.assert_array_equal(begun.tensor.data[:, :, :, :tokens], LAST.tensor.data[:, :, :, :tokens])
        store.close()


def test_a_beginning_in_one_part_is_not_copied() -> None:
    store = filled(DeltaStore(MemoryStore()))
    begun, held = load_beginning(store, LAST.meta, 40), store.get(CHUNKS[0].meta.id)
    assert begun is not None
    assert held is not None
    assert np.shares_memory(begun.tensor.data, held.tensor.data)


def test_what_is_not_there_has_no_beginning() -> None:
    other = prompt_chunk(range(500, 560)).meta
    for store in (DeltaStore(MemoryStore()), MemoryStore()):
        assert load_beginning(filled(store), other, 5) is None
        assert load_parts(store, other.id, [(0, 5)]) is None


@pytest.mark.parametrize(("start", "stop"), [(0, TOKENS), (0, 60), (30, 90), (59, 61), (100, TOKENS), (70, 71)])
def test_rows_are_joined_from_the_parts_that_hold_them(start: int, stop: int) -> None:
    tensor = joined(parts_of(filled(DeltaStore(MemoryStore()))), start, stop)
    assert tensor is not None
    assert same_bits(tensor, Tensor(LAST.tensor.data[:, :, :, start:stop], LAST.tensor.dtype))


def test_nothing_is_joined_where_a_row_is_missing() -> None:
    parts = parts_of(filled(DeltaStore(MemoryStore())))
    assert len(parts) > 3
    assert joined(parts[:1] + parts[2:], 0, TOKENS) is None
    assert joined(parts, 0, TOKENS + 1) is None
    assert joined(parts[:1], 0, 61) is None
    assert joined(parts[1:2], 0, 61) is None
    assert joined([], 0, 1) is None


class Unlike(MemoryStore):
    """Hands out parts of different models."""

    def get_parts(self, id: str, rows: Rows) -> list[Chunk] | None:
        first, second = self.parts
        return [first, replace(second, tensor=Tensor(second.tensor.data[:, :, :, :, :1], second.tensor.dtype))]

    parts = parts_of(filled(DeltaStore(MemoryStore())))[:2]


def test_parts_that_do_not_fit_each_other_are_no_beginning() -> None:
    store = Unlike()
    with pytest.raises(CorruptChunk, match="another shape"):
        joined(store.get_parts("", []) or [], 0, 80)
    assert load_beginning(store, LAST.meta, 80) is None
