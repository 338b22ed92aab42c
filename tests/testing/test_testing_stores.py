"""The suite for stores finds the faults it is there to find."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store.suite import WholeStoreTests

from dejakv.store.base import RawTensor, StoredState, StoreStats
from dejakv.store.budgets import Budget
from dejakv.store.store import Store
from dejakv.testing.stores import StoreTests


class KeepsTheCallersArray(Store):
    def put(self, stored_state: StoredState) -> bool:
        view = stored_state.tensor.data.view()
        view.flags.writeable = False
        self.kept = StoredState(stored_state.meta, RawTensor(view, stored_state.tensor.dtype))
        return super().put(stored_state)

    def get(self, id: str) -> StoredState | None:
        return self.kept


class TellsEverybodysStatistics(Store):
    def stats(self, partition: str | None = None, *, content: bool = True) -> StoreStats:
        return super().stats(None)


class NeverNotesAUse(Store):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._notes.note_use = lambda id, chain: None


class ForgetsVectors(Store):
    def put(self, stored_state: StoredState) -> bool:
        return super().put(replace(stored_state, meta=replace(stored_state.meta, vectors={})))


class IgnoresItsBudget(Store):
    def __init__(self, *, budget: Budget | None = None) -> None:
        super().__init__()


class TellsNobody(Store):
    def listen(self, **listeners: Any) -> None:
        pass


FAULTS = [
    (KeepsTheCallersArray, "test_what_is_loaded_cannot_be_written_to_and_is_nobody_elses"),
    (TellsEverybodysStatistics, "test_partitions_and_epochs_do_not_see_each_other"),
    (NeverNotesAUse, "test_the_least_recently_or_least_often_used_leaves"),
    (IgnoresItsBudget, "test_max_bytes_holds_and_evicts_as_many_as_it_takes"),
    (TellsNobody, "test_delete_and_clear_take_out_and_tell"),
]


def run(kind: type[Store], name: str, tmp_path: Path) -> None:
    class Suite(WholeStoreTests):
        def make_store(self, folder: Path, **settings: Any) -> Store:
            return kind(budget=Budget(**settings))

    test = getattr(Suite(), name)
    given = {"tmp_path": tmp_path, "policy": "lfu", "limit": "entries", "left": (0, 1, 3), "store": kind()}
    test(**{argument: given[argument] for argument in test.__annotations__ if argument in given})


@pytest.mark.parametrize(("kind", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_found(kind: type[Store], name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(kind, name, tmp_path)
    run(Store, name, tmp_path)


def test_lost_vectors_are_found() -> None:
    with pytest.raises(AssertionError):
        StoreTests().test_a_state_comes_back_as_it_went_in(ForgetsVectors(), "F32")


def test_a_suite_needs_a_store() -> None:
    with pytest.raises(NotImplementedError):
        StoreTests().make_store(Path())
