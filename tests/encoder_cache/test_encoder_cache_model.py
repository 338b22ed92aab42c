"""The cache against a plain reference: a list that is sorted whenever something must leave."""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dejakv.encoder_cache import QueueingController, VisualKVCache
from dejakv.store.selection import Selection

NAMES = st.sampled_from("abcdefgh")
PARTITIONS = st.sampled_from(["p", "q"])
SIZES = st.integers(1, 12)


@dataclass
class Item:
    size: int
    uses: int = 1
    number: float = 0.0
    last: int = 0


class Reference:
    """What the documentation says, in the order it says it. All figures in units of 8 bytes (one float64)."""

    def __init__(self, policy, max_entries, max_size):
        self.policy, self.max_entries, self.max_size = policy, max_entries, max_size
        self.items, self.age, self.clock, self.minimum = {}, 0.0, 0, 0

    def number(self, item):
        if self.policy == "lru":
            return 0.0
        return self.age + item.uses

    def use(self, key):
        item = self.items[key]
        self.clock += 1
        item.uses += 1
        item.last, item.number = self.clock, self.number(item)

    def store(self, key, size):
        """What leaves, or None if it is refused."""
        others = {name: item for name, item in self.items.items() if name != key}
        leaving = []
        order = sorted(others, key=lambda n: (others[n].number, others[n].last))
        if size > self.max_size:
            return None
        while len(others) + 1 > self.max_entries or sum(item.size for item in others.values()) + size > self.max_size:
            if len(self.items) - len(leaving) <= self.minimum:
                return None
            leaving.append(order.pop(0))
            del others[leaving[-1]]
        for name in leaving:
            self.age = max(self.age, self.items.pop(name).number)
        old = self.items.get(key)
        self.clock += 1
        item = Item(size, last=self.clock)
        if old:
            item.uses = old.uses
        item.number = self.number(item)
        self.items[key] = item
        return leaving


class EncoderCacheMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lfu", "lru"]), entries=st.integers(1, 6), size=st.integers(4, 40))
    def start(self, policy, entries, size):
        self.model = Reference(policy, entries, size)
        machine = self

        class Controller(QueueingController):
            def get_minimum_stable_blocks(self):
                return machine.model.minimum

        self.cache = VisualKVCache(entries, size * 8, Controller(), policy)
        self.evicted = self.refused = self.hits = self.misses = 0

    def view(self, partition):
        return self.cache.view("epoch", partition)

    def has(self, partition, name):
        """Whether the output is there, without using it."""
        return self.cache.purge(Selection(media=frozenset({(partition, name)})), dry_run=True).encoder_outputs == 1

    @rule(name=NAMES, partition=PARTITIONS, size=SIZES)
    def store(self, name, partition, size):
        left = self.model.store((partition, name), size)
        block = self.view(partition).store(name, "image", np.zeros((size, 1)))
        assert (block is None) == (left is None)
        self.refused += left is None
        self.evicted += len(left or ())

    @rule(name=NAMES, partition=PARTITIONS)
    def lookup(self, name, partition):
        block = self.view(partition).lookup(name)
        key = (partition, name)
        assert (block is not None) == (key in self.model.items)
        if block is None:
            self.misses += 1
        else:
            self.hits += 1
            self.model.use(key)
            assert block.access_count == self.model.items[key].uses - 1

    @rule(minimum=st.integers(0, 6))
    def controller_changes_its_mind(self, minimum):
        self.model.minimum = minimum

    @rule(partition=PARTITIONS)
    def clear_partition(self, partition):
        before = self.cache.stats(partition)
        self.hits -= before.hits
        self.misses -= before.misses
        self.refused -= sum(before.refusals.values())
        self.evicted -= sum(before.evictions[reason] for reason in before.evictions if reason != "replaced")
        self.cache.clear(partition)
        self.model.items = {key: item for key, item in self.model.items.items() if key[0] != partition}

    @invariant()
    def same_as_the_reference(self):
        if not hasattr(self, "model"):
            return
        held = {(p, n) for p in "pq" for n in "abcdefgh" if self.has(p, n)}
        assert held == set(self.model.items)
        stats = self.cache.stats()
        assert stats.entries == len(held) <= self.model.max_entries
        assert stats.bytes == 8 * sum(item.size for item in self.model.items.values()) <= self.cache.max_vram_bytes
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert sum(stats.refusals.values()) == self.refused
        assert sum(count for reason, count in stats.evictions.items() if reason != "replaced") == self.evicted
        parts = [self.cache.stats(partition) for partition in "pq"]
        assert sum(part.entries for part in parts) == stats.entries
        assert sum(part.bytes for part in parts) == stats.bytes


EncoderCacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestEncoderCacheModel = EncoderCacheMachine.TestCase
