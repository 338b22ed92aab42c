"""Prompts whose state is larger than what saves may hold in memory: stored in parts, one after the other.

A part is ordered when the one before it is stored on every rank. A request that is over keeps its blocks until the last part is
copied; of one that loses them before the parts that are stored serve as a prefix.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dejakv.engines.vllm.messages import Save
from dejakv.engines.vllm.saver import BACKLOG
from dejakv.store.base import ChunkMeta

PATIENCE_S = 10.0
"""How long a part may wait for room, or take to be stored, while blocks may be kept for the next one."""


@dataclass(frozen=True)
class PartSize:
    """What is stored in parts.

    tokens  of a part; prompts of up to twice as many are stored at once. 0: all are
    align   a part ends at a multiple of this: of a KV block, and of a block of the store's index of prefixes
    most    tokens that the store's budget has room for, 0: no limit
    """

    tokens: int = 0
    align: int = 1
    most: int = 0

    def ends(self, meta: ChunkMeta) -> tuple[int, ...]:
        """Where the parts of this prompt end; one end for a prompt that is stored at once."""
        count = meta.num_tokens
        if not self.tokens or count <= 2 * self.tokens:
            return (count,)
        step = max(self.align, self.tokens // self.align * self.align)
        return (*range(step, count, step), count)


@dataclass
class LongSave:
    """A prompt that is stored in parts.

    held       the request is over, and its blocks wait
    done       parts that are stored
    under_way  a part is ordered and not answered
    over       why no further part is ordered, empty while they are
    """

    meta: ChunkMeta
    request_id: str
    block_ids: tuple[int, ...]
    ends: tuple[int, ...]
    generation: int
    deadline: float
    held: bool
    done: int = 0
    under_way: bool = False
    over: str = ""

    @property
    def last(self) -> bool:
        """Whether the part that comes next, or is under way, is the last."""
        return self.done == len(self.ends) - 1

    def next(self) -> Save:
        """The order for the part that comes next. Blocks are released when it is answered: it may have to be repeated."""
        start = self.ends[self.done - 1] if self.done else 0
        return Save(self.meta, self.block_ids, self.generation, rows=(start, self.ends[self.done]))


@dataclass
class LongSaves:
    """All of them. Used in the engine loop alone.

    ended  is told of a prompt of which no further part is stored and none is under way, and why
    """

    ended: Callable[[str, str], None]
    clock: Callable[[], float] = time.monotonic
    _saves: dict[str, LongSave] = field(default_factory=dict[str, LongSave])
    _releases: set[str] = field(default_factory=set[str])

    def __len__(self) -> int:
        return len(self._saves)

    def add(
        self,
        meta: ChunkMeta,
        request_id: str,
        block_ids: Sequence[int],
        ends: tuple[int, ...],
        generation: int,
        *,
        held: bool,
    ) -> None:
        deadline = self.clock() + PATIENCE_S
        self._saves[meta.id] = LongSave(meta, request_id, tuple(block_ids), ends, generation, deadline, held)

    def take(self) -> tuple[list[Save], set[str]]:
        """This step's orders, and requests whose blocks are not needed any more."""
        orders: list[Save] = []
        for save in list(self._saves.values()):
            if save.over:
                continue
            if self.clock() >= save.deadline:
                self._end(save, "too slow: a part of a long prompt was not stored in time")
            elif not save.under_way:
                orders.append(save.next())
                save.under_way = True
        releases, self._releases = self._releases, set()
        return orders, releases

    def heard(self, id: str, problem: str) -> str | None:
        """All ranks answered a part. Of a prompt that is stored in parts: None while it goes on; afterwards, and of any other
        prompt, why it is not stored."""
        save = self._saves.get(id)
        if save is None:
            return problem
        save.under_way = False
        complete = not problem and save.last
        if not save.over:
            if problem == BACKLOG:  # until its time is over, see `take`
                return None
            if not problem and not complete:
                save.done, save.deadline = save.done + 1, self.clock() + PATIENCE_S
                return None
            self._give_up(save, problem)
        del self._saves[id]
        return "" if complete else save.over

    def finished(self, request_id: str, *, lost: bool) -> bool:
        """The request is over; `lost`: its blocks cannot be kept. Whether they must wait for a copy."""
        save = self._of(request_id)
        if save is None:
            return False
        if lost:
            self._end(save, "the request was ended while its state was being stored")
        save.held = not lost
        return save.held

    def preempted(self, request_id: str) -> bool:
        """The request has lost its blocks. True if its state was being stored, and is not any more."""
        save = self._of(request_id)
        if save is not None:
            self._end(save, "the request was preempted while its state was being stored")
        return save is not None

    def end_all(self, why: str) -> None:
        for save in list(self._saves.values()):
            if not save.over:
                self._end(save, why)

    def _of(self, request_id: str) -> LongSave | None:
        return next((one for one in self._saves.values() if one.request_id == request_id and not one.over), None)

    def _give_up(self, save: LongSave, why: str) -> None:
        save.over = why
        if save.held:
            self._releases.add(save.request_id)

    def _end(self, save: LongSave, why: str) -> None:
        """No further part; an answer that is still to come is the last that is heard of it."""
        self._give_up(save, why)
        if not save.under_way:
            del self._saves[save.meta.id]
            self.ended(save.meta.id, why)
