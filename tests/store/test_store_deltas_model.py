"""Stores without duplicates against a dictionary of whole chunks, over random sequences of operations."""

import shutil
import tempfile
from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.store.layers import layer

from dejakv.store import open_store
from dejakv.store.base import NODE, Chunk
from dejakv.store.deltas import DeltaStore
from dejakv.store.parts import joined
from dejakv.testing.chunks import same_bits
from dejakv.testing.prompts import prompt_chunk

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
LENGTHS = st.integers(1, 24)
PARTITIONS = st.sampled_from(["a", "b"])


def prompt(path: list[int], last: int, partition: str) -> Chunk:
    """A walk in a tree: each step adds 20 tokens that name it, the last step `last`."""
    tokens = [100 * depth + 1000 * step + n for depth, step in enumerate(path) for n in range(24)]
    return prompt_chunk(tokens[: 24 * (len(path) - 1) + last], partition=partition)


class DeltasMachine(RuleBasedStateMachine):
    """The model: chunks by id, less those that the listeners were told of."""

    @initialize(
        limit=st.sampled_from([{}, {"max_entries": 2}, {"max_entries": 4}, {"max_bytes": 9000}, {"max_bytes": 16_000}]),
        policy=st.sampled_from(["lru", "lfu"]),
        partitions=st.sampled_from([1, 2]),
    )
    def open(self, limit: dict[str, int], policy: Any, partitions: int) -> None:
        self.settings = {**limit, "policy": policy, "partitions": partitions}
        self.folder = tempfile.mkdtemp()
        self.model: dict[str, Chunk] = {}
        self.make()

    def where(self) -> Any:
        return None

    def make(self) -> None:
        self.store = open_store(self.where(), **self.settings)
        self.store.on_evict(self.forget)

    def forget(self, id: str) -> None:
        self.model.pop(id, None)

    @rule(path=PATHS, last=LENGTHS, partition=PARTITIONS)
    def put(self, path: list[int], last: int, partition: str) -> None:
        chunk = prompt(path, last, partition)
        if self.store.put(chunk):
            self.model[chunk.meta.id] = chunk
        else:
            assert any("max" in name for name in self.settings)

    @rule(path=PATHS, last=LENGTHS, partition=PARTITIONS)
    def get(self, path: list[int], last: int, partition: str) -> None:
        id = prompt(path, last, partition).meta.id
        found, expected = self.store.get(id), self.model.get(id)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert same_bits(found.tensor, expected.tensor)

    @rule(number=st.integers(0, 30), start=st.integers(0, 90), length=st.integers(1, 60))
    def get_parts(self, number: int, start: int, length: int) -> None:
        for id, expected in list(self.model.items())[number : number + 1]:
            self.store = layer(self.store, DeltaStore)
            stop = min(start + length, expected.meta.num_tokens)
            parts = self.store.get_parts(id, [(start, stop)] if start < stop else [])
            assert parts
            if start < stop:
                found = joined(parts, start, stop)
                assert found is not None
                assert found.data.tobytes() == expected.tensor.data[:, :, :, start:stop].tobytes()

    @rule(path=PATHS, last=LENGTHS, partition=PARTITIONS)
    def delete(self, path: list[int], last: int, partition: str) -> None:
        id = prompt(path, last, partition).meta.id
        known = id in self.model
        assert self.store.delete(id) is known
        assert id not in self.model

    @rule(number=st.integers(0, 30))
    def delete_one(self, number: int) -> None:
        for id in list(self.model)[number : number + 1]:
            assert self.store.delete(id) is True
            assert id not in self.model

    @rule(partition=PARTITIONS)
    def clear(self, partition: str) -> None:
        held = sum(chunk.meta.partition == partition for chunk in self.model.values())
        assert self.store.clear(partition) == held
        assert all(chunk.meta.partition != partition for chunk in self.model.values())

    @precondition(lambda self: self.where() is not None)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.make()

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert {meta.id for meta in self.store.metas()} == set(self.model)
        stats = self.store.stats()
        assert stats.entries == len(self.model)
        assert stats.corrupt == 0
        assert stats.bytes <= self.settings.get("max_bytes", stats.bytes)
        assert stats.entries <= self.settings.get("max_entries", stats.entries)
        assert (stats.bytes > 0) == bool(self.model)

    @invariant()
    def parents_are_there_and_nodes_have_children(self) -> None:
        self.store = layer(self.store, DeltaStore)
        raw = {meta.id: meta for meta in self.store.inner.metas()}
        parents = {meta.parent for meta in raw.values() if meta.parent}
        assert parents <= set(raw)
        for meta in raw.values():
            assert meta.id in parents or meta.kind != NODE
            if meta.parent:
                assert raw[meta.parent].num_tokens == meta.rows_from
                assert raw[meta.parent].partition == meta.partition

    def teardown(self) -> None:
        for chunk in list(self.model.values()):
            found = self.store.get(chunk.meta.id)
            assert found is not None
            assert same_bits(found.tensor, chunk.tensor)
        self.store.close()
        shutil.rmtree(self.folder)


class DiskMachine(DeltasMachine):
    def where(self) -> Any:
        return self.folder


class TieredMachine(DiskMachine):
    def make(self) -> None:
        self.settings["memory_bytes"] = 6000
        super().make()


def test_prompts_of_the_machine_share_their_beginnings() -> None:
    one, other = prompt([0, 1], 24, "a"), prompt([0, 1, 2], 5, "a")
    assert other.meta.token_ids[:48] == one.meta.token_ids
    assert all(left != right for left, right in pairwise(other.meta.token_ids))


TestMemoryAgainstDictionary = DeltasMachine.TestCase
TestMemoryAgainstDictionary.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDiskAgainstDictionary = DiskMachine.TestCase
TestDiskAgainstDictionary.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestTiersAgainstDictionary = TieredMachine.TestCase
TestTiersAgainstDictionary.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
