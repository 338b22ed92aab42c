"""Saves, on the scheduler's side: ordered when a prompt's first answer token is out, and indexed when every rank has stored its part."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Any

from dejakv.decide.costs import Rate
from dejakv.engines.vllm.generations import Generations
from dejakv.engines.vllm.identity import partition_of
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.messages import BACKLOG, Save
from dejakv.engines.vllm.ranks import Answers
from dejakv.engines.vllm.request import Tracked
from dejakv.engines.vllm.stats import ConnectorCounts
from dejakv.store.base import KV, ROWS, ChunkMeta

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


RESET = "a reset: the weights may have changed"


@dataclass
class Saves:
    """Orders to the worker, and what becomes of them.

    ranks     workers that each store their part of the heads
    size      which prompts are stored in parts
    pending   what was ordered and is not confirmed, by chunk id
    """

    lookups: Lookups
    counts: ConnectorCounts
    generations: Generations
    ranks: int
    size: PartSize = field(default_factory=PartSize)
    pending: dict[str, ChunkMeta] = field(default_factory=dict[str, ChunkMeta])
    _orders: list[Save] = field(default_factory=list[Save])
    _outdated: set[str] = field(default_factory=set[str])
    _began: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    _token: Rate | None = None

    def __post_init__(self) -> None:
        self._heard = Answers[str](self.ranks)
        self._long = LongSaves(self._over)

    def order(self, tracked: Tracked, block_ids: Sequence[int], *, release: bool) -> bool:
        """Has the state of a computed prompt stored, if it is wanted, of a blended one its new text alone; `release`: its blocks wait
        for the copy. True if they do."""
        tracked.saved = True
        metas = [meta for meta in self._to_save(tracked) if meta.id not in self.pending]
        if not metas:
            return False
        why = self.of_no_use(tracked)
        if not why and not self.lookups.adapters.may_store(tracked.request.lora_request):
            why = "LoRA: which weights computed it is not proven"
        if why:
            self.counts.add("saves_dropped", why)
            return False
        for meta in metas:
            if not self._ordered(meta, tracked.request.request_id, block_ids, release=release, last=meta is metas[-1]):
                return False
            self.pending[meta.id] = meta
            self._began[meta.id] = time.monotonic(), _adapter(tracked.request)
        return True

    def covering(self, request: Any) -> tuple[str, int]:
        """The save under way that holds the longest prefix of a prompt, and the tokens of that; `("", 0)` if none holds any."""
        partition, adapter, best = partition_of(request.cache_salt), _adapter(request), ("", 0)
        for meta in self.pending.values():
            began = self._began.get(meta.id)
            if began is None or began[1] != adapter or meta.id in self._outdated:
                continue
            if meta.kind == KV and meta.partition == partition:
                differs = compress(count(), map(ne, request.prompt_token_ids, meta.token_ids))
                tokens = next(differs, min(request.num_prompt_tokens, meta.num_tokens))
                best = max(best, (meta.id, tokens), key=lambda found: found[1])
        return best

    def seconds_left(self, chunk_id: str) -> float:
        """Until a save under way is stored, going by earlier ones; 0 before the first."""
        if self._token is None or chunk_id not in self._began:
            return 0.0
        took = time.monotonic() - self._began[chunk_id][0]
        return max(0.0, self._token.value * self.pending[chunk_id].num_tokens - took)

    def _to_save(self, tracked: Tracked) -> list[ChunkMeta]:
        meta, loaded = tracked.to_save(), tracked.loaded
        if meta is None or not tracked.approximate:
            return [] if meta is None else [meta]
        if loaded is None or loaded.kept is None or tracked.shared:  # which donors are in what was shared is not known
            return []
        tracked.kept = self.lookups.rows_of(meta, loaded.kept)
        return tracked.kept

    def _ordered(
        self, meta: ChunkMeta, request_id: str, block_ids: Sequence[int], *, release: bool, last: bool
    ) -> bool:
        """Orders one save, or its first part; False if it is too large. Blocks are released by the `last` one of a request."""
        generation, ends = self.generations.number, self.size.ends(meta) if meta.kind == KV else (meta.num_tokens,)
        if len(ends) == 1:
            waits = request_id if release and last else None
            self._orders.append(Save(meta, tuple(block_ids), generation, waits))
        elif self.size.most and meta.num_tokens > self.size.most:
            self.counts.add("saves_dropped", "too large: the prompt's state is larger than max_bytes")
            return False
        else:
            self._long.add(meta, request_id, block_ids, ends, generation, held=release)
        return True

    def preempted(self, request_id: str) -> bool:
        """A request has lost its blocks. True if its state was being stored, and is not any more."""
        return self._long.preempted(request_id)

    def take(self) -> tuple[list[Save], frozenset[str]]:
        """This step's orders, and requests whose blocks need not wait any more."""
        orders, self._orders = self._orders, []
        parts, releases = self._long.take()
        return orders + parts, frozenset(releases)

    @property
    def storing(self) -> bool:
        """Whether prompts are being stored in parts."""
        return len(self._long) > 0

    def finished(self, request_id: str, *, lost: bool) -> bool:
        """A request is over whose state may be under way; `lost`: its blocks cannot be kept. Whether they must wait for a copy."""
        return self._long.finished(request_id, lost=lost)

    def heard(self, chunk_id: str, problem: str) -> None:
        """A rank has stored its part of a chunk, or has not, and why."""
        problems = self._heard.add(chunk_id, problem)
        if problems is None:
            return
        severe = sorted(filter(None, problems), key=BACKLOG.__eq__)  # another problem is not mended by another try
        why = self._long.heard(chunk_id, severe[0] if severe else "")
        if why is not None:
            self._over(chunk_id, why)

    def outdate(self) -> None:
        """The weights may have changed: what is under way is not indexed."""
        self._outdated.update(self.pending)
        self._long.end_all(RESET)

    def _over(self, chunk_id: str, why: str) -> None:
        """Nothing more comes of a save. `why` it was not made, if it was not."""
        meta, began = self.pending.pop(chunk_id, None), self._began.pop(chunk_id, None)
        if meta is not None and began is not None and not why:
            taken = (time.monotonic() - began[0]) / meta.num_tokens
            if self._token is None:
                self._token = Rate(taken)
            else:
                self._token.add(taken)
        if why:
            self.counts.add("saves_dropped", why)
        elif chunk_id in self._outdated and meta is not None:
            self.counts.add("saves_dropped", RESET)
            self.lookups.index.drop(meta.id)
        elif meta is not None:
            self.lookups.index.stored(meta)
            if meta.kind == ROWS:
                self.counts.add("rows_kept", amount=meta.num_tokens)
            else:
                self.counts.add("saves")
        self._outdated.discard(chunk_id)

    def of_no_use(self, tracked: Tracked) -> str:
        """Why a request's state is neither stored nor put together from what is stored; empty if it may be."""
        if self.generations.problem:
            return self.generations.problem
        return "" if tracked.generation == self.generations.number else RESET


def _adapter(request: Any) -> str:
    return "" if request.lora_request is None else str(request.lora_request.lora_path)
