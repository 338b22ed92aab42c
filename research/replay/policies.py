"""Caches that a trace is replayed through.

Each tells of every request how many leading blocks it held, and takes the prompt.

`Segments` is DejaKV's store, evicted in the order of a policy. `Blocks` is an engine's own prefix
cache. `Infinite` forgets nothing. `Belady` knows the future and evicts the block that is needed
last (Belady, 1966): with equal blocks no policy at this budget holds more.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from research.replay.trace import Call, Trace

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


class Segments:
    """DejaKV's store: what a request newly computes stays in segments that leave as a whole.

    Parameters
    ----------
    trace : Trace
        The trace, for the size of a block. A segment has at most 256 tokens, or one block.
    policy : {"lru", "lfu"}
        `lru`: least recently used first; `lfu`: least often used, then least recently. Uses are
        noted from a prompt's end to its beginning, so the end leaves first.
    budget : int
        Tokens of all segments together.
    """

    CAP = 256

    def __init__(self, trace: Trace, policy: str, budget: int) -> None:
        self._sizes, self._by_hits, self._budget = trace.sizes, policy == "lfu", budget
        self._of: dict[int, int] = {}  # the segment of each block
        self._blocks: dict[int, list[int]] = {}
        self._use: dict[
            int, tuple[int, int]
        ] = {}  # hits if they count, and the time of the last use
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._clock = self._made = self._tokens = 0
        self.evictions = 0

    def serve(self, call: Call) -> int:
        held = sum(1 for _ in takewhile(self._of.__contains__, call.blocks))
        used = dict.fromkeys(self._of[block] for block in call.blocks[:held])
        new = self._cut([block for block in call.blocks[held:] if block not in self._of])
        for segment in reversed(new):
            self._touch(segment, 0)
        for segment in reversed(used):
            self._touch(segment, self._use[segment][0] + self._by_hits)
        self._evict()
        return held

    def _cut(self, blocks: Sequence[int]) -> list[int]:
        """Stores blocks as segments, in their order; returns the segments."""
        made: list[int] = []
        room = 0
        for block in blocks:
            size = self._sizes[block]
            if size > room:
                self._made += 1
                made.append(self._made)
                self._blocks[self._made] = []
                room = self.CAP
            room -= size
            self._blocks[self._made].append(block)
            self._of[block] = self._made
            self._tokens += size
        return made

    def _touch(self, segment: int, hits: int) -> None:
        self._clock += 1
        self._use[segment] = (hits, self._clock)
        heapq.heappush(self._heap, (self._use[segment], segment))

    def _evict(self) -> None:
        while self._tokens > self._budget:
            use, segment = heapq.heappop(self._heap)
            if self._use.get(segment) != use:
                continue  # used since
            del self._use[segment]
            for block in self._blocks.pop(segment):
                del self._of[block]
                self._tokens -= self._sizes[block]
            self.evictions += 1


class Blocks:
    """Prefix cache of blocks, least recently used first.

    Of one prompt the end goes before the beginning, as in vLLM.
    """

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
            # Of blocks that are due together the deepest goes first: without its prefix a block is
            # of no use.
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
