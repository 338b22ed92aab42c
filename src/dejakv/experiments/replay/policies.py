"""Caches that a trace is replayed through. Each tells of every request how many leading blocks it held, and takes the prompt.

`Chunks` is DejaKV's store: equal beginnings once, evicted in the order of a policy. `Blocks` is an engine's own prefix cache.
`Infinite` forgets nothing. `Belady` knows the future and evicts the block that is needed last (Belady, 1966): with equal
blocks no policy at this budget holds more.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import Protocol

from dejakv.experiments.replay.trace import Call, Trace
from dejakv.store.eviction import Policy
from dejakv.store.order import EvictionOrder

NEVER = 1 << 60


class Replayed(Protocol):
    """A cache under test. `evictions` counts the entries that had to leave."""

    evictions: int

    def serve(self, call: Call) -> int:
        """The number of leading blocks that were held; the prompt is stored afterwards."""
        ...


class Infinite:
    """Every block is kept."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self.evictions = 0

    def serve(self, call: Call) -> int:
        held = sum(1 for _ in takewhile(self._held.__contains__, call.blocks))
        self._held.update(call.blocks)
        return held


class Chunks:
    """DejaKV's store: of each prompt the blocks that no stored prompt begins with. Where a prompt leaves another one's blocks,
    these are split, and the part before belongs to both (`DeltaStore`). Blocks are the least that is shared.

    An entry is named by its last block, since that tells all before it.

    budget  tokens of all entries together
    """

    def __init__(self, trace: Trace, policy: Policy, budget: int) -> None:
        self._sizes = trace.sizes
        self._order = EvictionOrder(policy)
        self._budget = budget
        self._own: dict[str, tuple[int, ...]] = {}
        self._parents: dict[str, str] = {}
        self._owner: dict[int, str] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._holders: dict[int, dict[str, None]] = {}
        self.evictions = 0

    def serve(self, call: Call) -> int:
        blocks = call.blocks
        if not blocks:
            return 0
        held = sum(1 for _ in takewhile(self._owner.__contains__, blocks))
        own = str(blocks[-1])
        if own in self._prompts:
            self._read(own, own)
            return held
        if held:
            donor = next(reversed(self._holders[blocks[held - 1]]))
            self._read(donor, self._owner[blocks[held - 1]])
        self._put(own, blocks, held)
        return held

    def _read(self, donor: str, last: str) -> None:
        """Uses of a prompt's entries, the first blocks first, as far as `last`; and of the prompt itself in any case."""
        if donor != last:
            self._order.touch(donor)
        chain = [last]
        while parent := self._parents[chain[-1]]:
            chain.append(parent)
        for id in reversed(chain):
            self._order.touch(id)

    def _put(self, id: str, blocks: tuple[int, ...], held: int) -> None:
        parent, own = "", blocks
        if id in self._own:  # the beginning of others: they hold its blocks
            parent, own = self._parents[id], self._own[id]
        elif held:
            parent, own = self._split(self._owner[blocks[held - 1]], blocks[held - 1], id), blocks[held:]
        if parent != id and not self._stored(id, own, parent, blocks):
            return
        self._prompts[id] = blocks
        for block in blocks:
            self._holders.setdefault(block, {})[id] = None

    def _stored(self, id: str, own: tuple[int, ...], parent: str, blocks: tuple[int, ...]) -> bool:
        """Whether there is room for a prompt after what is evicted for it."""
        if self._tokens(blocks) > self._budget:
            return False
        size = self._tokens(own)
        over = self._order.bytes + size - self._order.size(id) - self._budget
        leaving = self._order.evict(max(0, over), 0, {id}, parent)
        if leaving is None:
            return False
        self._drop(leaving.gone)
        self._order.add(id, size, parent)
        self._hold(id, own, parent)
        return True

    def _split(self, held: str, last: int, new: str) -> str:
        """The entry that ends with the block `last`: an entry is split there, unless it ends so already."""
        upper = str(last)
        if upper == held:
            return held
        self._order.touch(held)
        at = self._own[held].index(last) + 1
        before, after = self._own[held][:at], self._own[held][at:]
        self._order.split(upper, self._tokens(before), held, self._tokens(after), is_node=upper != new)
        self._hold(upper, before, self._parents[held])
        self._hold(held, after, upper)
        return upper

    def _hold(self, id: str, own: tuple[int, ...], parent: str) -> None:
        self._own[id], self._parents[id] = own, parent
        self._owner.update(dict.fromkeys(own, id))

    def _drop(self, gone: Iterable[str]) -> None:
        for id in gone:
            for block in self._own.pop(id):
                del self._owner[block]
            del self._parents[id]
            if id not in self._prompts:
                continue
            self.evictions += 1
            for block in self._prompts.pop(id):
                holders = self._holders[block]
                del holders[id]
                if not holders:
                    del self._holders[block]

    def _tokens(self, blocks: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, blocks))


class Blocks:
    """A prefix cache of blocks, least recently used first; of one prompt the end goes before the beginning, as in vLLM."""

    def __init__(self, trace: Trace, budget: int) -> None:
        self._sizes = trace.sizes
        self._budget = budget
        self._held: OrderedDict[int, None] = OrderedDict()
        self._tokens = 0
        self.evictions = 0

    def serve(self, call: Call) -> int:
        held = sum(1 for _ in takewhile(self._held.__contains__, call.blocks))
        for block in reversed(call.blocks):
            if block in self._held:
                self._held.move_to_end(block)
            else:
                self._held[block] = None
                self._tokens += self._sizes[block]
        while self._tokens > self._budget:
            block, _ = self._held.popitem(last=False)
            self._tokens -= self._sizes[block]
            self.evictions += 1
        return held


class Belady:
    """Blocks, the one needed last evicted first. What is never needed again is not stored."""

    def __init__(self, trace: Trace, budget: int) -> None:
        self._sizes = trace.sizes
        self._budget = budget
        self._next = _next_uses(trace)
        self._call = 0
        self._held: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._tokens = 0
        self.evictions = 0

    def serve(self, call: Call) -> int:
        held = sum(1 for _ in takewhile(self._held.__contains__, call.blocks))
        for place, (block, due) in enumerate(zip(call.blocks, self._next[self._call], strict=True)):
            if due == NEVER:
                if self._held.pop(block, None) is not None:
                    self._tokens -= self._sizes[block]
                continue
            if block not in self._held:
                self._tokens += self._sizes[block]
            self._held[block] = due
            # Of blocks that are due together the deepest goes first: without its prefix a block is of no use.
            heapq.heappush(self._heap, (-due, -place, block))
        while self._tokens > self._budget:
            due, _, block = heapq.heappop(self._heap)
            if self._held.get(block) == -due:
                del self._held[block]
                self._tokens -= self._sizes[block]
                self.evictions += 1
        self._call += 1
        return held


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    due: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace.calls) - 1, -1, -1):
        blocks = trace.calls[number].blocks
        uses.append([due.get(block, NEVER) for block in blocks])
        due.update(dict.fromkeys(blocks, number))
    uses.reverse()
    return uses
