"""The suite for stores finds the faults it is there to find."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dejakv.store.base import Chunk, Store, StoreStats, Tensor
from dejakv.store.memory import MemoryStore
from dejakv.testing.stores import StoreTests


class KeepsTheCallersArray(MemoryStore):
    def put(self, chunk: Chunk) -> bool:
        view = chunk.tensor.data.view()
        view.flags.writeable = False
        return super().put(Chunk(chunk.meta, Tensor(view, chunk.tensor.dtype)))


class TellsEverybodysStatistics(MemoryStore):
    def stats(self, partition: str | None = None) -> StoreStats:
        return super().stats(None)


class NeverNotesAUse(MemoryStore):
    def get(self, id: str) -> Chunk | None:
        return self._chunks.get(id)


class ForgetsVectors(MemoryStore):
    def put(self, chunk: Chunk) -> bool:
        return super().put(replace(chunk, meta=replace(chunk.meta, vectors={})))


class IgnoresItsBudget(MemoryStore):
    def __init__(self, max_bytes: int = 0, max_entries: int = 0, policy: Any = "lru") -> None:
        super().__init__(0, 0, policy)


class TellsNobody(MemoryStore):
    def on_evict(self, listener: Callable[[str], None]) -> None:
        pass


FAULTS = [
    (KeepsTheCallersArray, "test_what_is_loaded_cannot_be_written_to_and_is_nobody_elses"),
    (TellsEverybodysStatistics, "test_partitions_do_not_see_each_other"),
    (NeverNotesAUse, "test_max_entries_evicts_the_least_recently_used"),
    (NeverNotesAUse, "test_lfu_evicts_the_least_often_used"),
    (IgnoresItsBudget, "test_max_bytes_holds_and_evicts_as_many_as_it_takes"),
    (IgnoresItsBudget, "test_what_is_larger_than_the_budget_is_refused_and_evicts_nothing"),
    (TellsNobody, "test_delete_and_clear_take_out_and_tell"),
]


def run(kind: type[MemoryStore], name: str, tmp_path: Path) -> None:
    class Suite(StoreTests):
        def make_store(self, folder: Path, **settings: Any) -> Store:
            return kind(**settings)

    test = getattr(Suite(), name)
    argument = {"tmp_path": tmp_path} if "tmp_path" in test.__annotations__ else {"store": kind()}
    test(**argument)


@pytest.mark.parametrize(("kind", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_found(kind: type[MemoryStore], name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(kind, name, tmp_path)
    run(MemoryStore, name, tmp_path)


def test_lost_vectors_are_found() -> None:
    with pytest.raises(AssertionError):
        StoreTests().test_a_chunk_comes_back_as_it_went_in(ForgetsVectors(), "F32")


def test_a_suite_needs_a_store() -> None:
    with pytest.raises(NotImplementedError):
        StoreTests().make_store(Path())
