"""Memory and disk against a plain model, over random sequences of operations."""

import shutil
import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import soak_rounds

from dejakv.store.base import StoredState
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stored_states import make_stored_state, same_bits

NUMBERS = st.integers(0, 7)
PARTITIONS = st.sampled_from(["a", "b"])


class StoreMachine(RuleBasedStateMachine):
    """The model: a list of [stored state, hits], least recently used first."""

    persistent = False

    @initialize(max_entries=st.sampled_from([0, 1, 3, 5]), policy=st.sampled_from(["lru", "lfu"]))
    def open(self, max_entries: int, policy: Any) -> None:
        self.settings = {"max_entries": max_entries, "policy": policy}
        self.folder = tempfile.mkdtemp()
        self.model: list[list[Any]] = []
        self.store = self.listening(self.make())

    def make(self) -> Store:
        return open_store(**self.settings)

    def listening(self, store: Store) -> Store:
        self.told: set[str] = set()
        store.listen(removed=self.told.add)
        return store

    def held(self) -> dict[str, StoredState]:
        return {stored_state.meta.id: stored_state for stored_state, _ in self.model}

    def forget(self, ids: set[str]) -> None:
        self.model = [item for item in self.model if item[0].meta.id not in ids]
        assert ids <= self.told
        self.told.clear()

    @rule(number=NUMBERS, partition=PARTITIONS, seed=st.integers(0, 2))
    def put(self, number: int, partition: str, seed: int) -> None:
        stored_state = make_stored_state(number, partition=partition, seed=seed, nbytes=256)
        id, limit = stored_state.meta.id, self.settings["max_entries"]
        victims: set[str] = set()
        if limit and id not in self.held() and len(self.model) >= limit:
            order = self.model if self.settings["policy"] == "lru" else sorted(self.model, key=lambda item: item[1])
            victims = {order[0][0].meta.id}
        assert self.store.put(stored_state) is True
        self.forget(victims)
        hits = sum(uses for one, uses in self.model if one.meta.id == id)
        self.model = [item for item in self.model if item[0].meta.id != id]
        self.model.append([stored_state, hits])

    @rule(number=NUMBERS, partition=PARTITIONS)
    def get(self, number: int, partition: str) -> None:
        id = make_stored_state(number, partition=partition, nbytes=256).meta.id
        found = self.store.get(id)
        expected = self.held().get(id)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert same_bits(found.tensor, expected.tensor)
            item = next(item for item in self.model if item[0].meta.id == id)
            self.model.remove(item)
            self.model.append([item[0], item[1] + 1])

    @rule(number=NUMBERS, partition=PARTITIONS)
    def delete(self, number: int, partition: str) -> None:
        id = make_stored_state(number, partition=partition, nbytes=256).meta.id
        known = id in self.held()
        assert self.store.delete(id) is known
        self.forget({id} if known else set())

    @rule(partition=PARTITIONS)
    def clear(self, partition: str) -> None:
        ids = {id for id, stored_state in self.held().items() if stored_state.meta.partition == partition}
        assert self.store.clear(partition) == len(ids)
        self.forget(ids)

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.listening(self.make())

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        metas = {meta.id for meta in self.store.metas()}
        assert metas == set(self.held())
        assert self.store.stats().entries == len(metas)
        for partition in ("a", "b"):
            expected = sum(stored_state.meta.partition == partition for stored_state in self.held().values())
            assert self.store.stats(partition).entries == expected
        bytes_of = [self.store.stats(partition).bytes for partition in ("a", "b")]
        assert sum(bytes_of) == self.store.stats().bytes
        assert (self.store.stats().bytes > 0) == bool(metas)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class DiskMachine(StoreMachine):
    persistent = True

    def make(self) -> Store:
        return open_store(self.folder, **self.settings)

    beside: Store | None = None

    @rule()
    def go_on_in_another_store(self) -> None:
        """Two stores use the folder and take turns, so that each meets what the other one did."""
        self.store.flush()
        other = self.beside or self.make()
        self.beside, self.store = self.store, self.listening(other)

    def teardown(self) -> None:
        if self.beside is not None:
            self.beside.close()
        super().teardown()


TestMemoryAgainstModel = StoreMachine.TestCase
TestMemoryAgainstModel.settings = settings(max_examples=30 * soak_rounds(), stateful_step_count=40, deadline=None)
TestDiskAgainstModel = DiskMachine.TestCase
TestDiskAgainstModel.settings = settings(max_examples=10 * soak_rounds(), stateful_step_count=40, deadline=None)
