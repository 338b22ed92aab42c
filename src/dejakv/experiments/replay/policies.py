"""Caches that a trace is replayed through. Each tells of every request how many leading blocks it held, and takes the prompt.

`Chunks` is DejaKV's store: an entry a prompt, evicted in the order of a policy. `Blocks` is an engine's own prefix cache.
`Infinite` forgets nothing. `Belady` knows the future and evicts the block that is needed last (Belady, 1966): with equal
blocks no policy at this budget holds more.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection
from itertools import takewhile
from typing import Protocol

from dejakv.experiments.replay.trace import Call, Trace
from dejakv.store.order import Leaving

NEVER = 1 << 60


class Order(Protocol):
    """The order of eviction: `dejakv.store.order.EvictionOrder`, or a candidate for it."""

    bytes: int

    def add(self, id: str, nbytes: int) -> object: ...

    def touch(self, id: str) -> object: ...

    def evict(self, nbytes: int, entries: int, protected: Collection[str] = ()) -> Leaving | None: ...


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
    """DejaKV's store: each prompt is an entry with all of its tokens; the donor of a prefix is used, and nobody else.

    budget  tokens of all entries together
    """

    def __init__(self, order: Order, budget: int) -> None:
        self._order = order
        self._budget = budget
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._holders: dict[int, dict[str, None]] = {}
        self._ending: dict[int, str] = {}
        self._count = 0
        self.evictions = 0

    def serve(self, call: Call) -> int:
        blocks, holders = call.blocks, self._holders
        held = sum(1 for _ in takewhile(holders.__contains__, blocks))
        own = self._ending.get(blocks[-1]) if blocks else None
        if own is not None:
            self._order.touch(own)
            return held
        if held:
            self._order.touch(next(reversed(holders[blocks[held - 1]])))
        self._put(call)
        return held

    def _put(self, call: Call) -> None:
        if call.tokens > self._budget or not call.blocks:
            return
        over = self._order.bytes + call.tokens - self._budget
        leaving = self._order.evict(over, 0) if over > 0 else None
        for id in leaving.gone if leaving is not None else ():
            self._drop(id)
        self._count += 1
        id = str(self._count)
        self._order.add(id, call.tokens)
        self._chunks[id] = call.blocks
        self._ending[call.blocks[-1]] = id
        for block in call.blocks:
            self._holders.setdefault(block, {})[id] = None

    def _drop(self, id: str) -> None:
        self.evictions += 1
        blocks = self._chunks.pop(id)
        del self._ending[blocks[-1]]
        for block in blocks:
            holders = self._holders[block]
            del holders[id]
            if not holders:
                del self._holders[block]


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


class AgeingOrder:
    """A candidate that the store does not have: least often used with dynamic ageing (Arlitt and others, 2000).

    An entry's priority is its uses plus the priority of the last entry evicted before its last use, so old fame fades.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._age = 0
        self._clock = 0
        self._entries: dict[str, tuple[int, int, tuple[int, int]]] = {}
        self._heap: list[tuple[tuple[int, int], str]] = []

    def add(self, id: str, nbytes: int) -> None:
        self.bytes += nbytes
        self._set(id, nbytes, 1)

    def touch(self, id: str) -> None:
        nbytes, uses, _ = self._entries[id]
        self._set(id, nbytes, uses + 1)

    def evict(self, nbytes: int, entries: int, protected: Collection[str] = ()) -> Leaving | None:
        gone: list[str] = []
        freed = 0
        while freed < nbytes and self._heap:
            rank, id = heapq.heappop(self._heap)
            if id in self._entries and self._entries[id][2] == rank:
                freed += self._entries.pop(id)[0]
                self._age = rank[0]
                gone.append(id)
        self.bytes -= freed
        return Leaving(tuple(gone))

    def _set(self, id: str, nbytes: int, uses: int) -> None:
        self._clock += 1
        rank = (uses + self._age, self._clock)
        self._entries[id] = (nbytes, uses, rank)
        heapq.heappush(self._heap, (rank, id))


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
