"""Saves, on the scheduler's side: ordered when a prompt's first answer token is out, and indexed when every rank has stored its part."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.generations import Generations
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.messages import Save
from dejakv.engines.vllm.ranks import Answers
from dejakv.engines.vllm.tracked import Tracked
from dejakv.store.base import ROWS, ChunkMeta

RESET = "a reset: the weights may have changed"


@dataclass
class Saves:
    """Orders to the worker, and what becomes of them.

    ranks     workers that each store their part of the heads
    pending   what was ordered and is not confirmed, by chunk id
    """

    lookups: Lookups
    counts: Counts
    generations: Generations
    ranks: int
    pending: dict[str, ChunkMeta] = field(default_factory=dict[str, ChunkMeta])
    _orders: list[Save] = field(default_factory=list[Save])
    _outdated: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._heard = Answers[str](self.ranks)

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
            self.pending[meta.id] = meta
            waits = tracked.request.request_id if release and meta is metas[-1] else None
            self._orders.append(Save(meta, tuple(block_ids), self.generations.number, waits))
        return True

    def _to_save(self, tracked: Tracked) -> list[ChunkMeta]:
        meta, loaded = tracked.to_save(), tracked.loaded
        if meta is None or not tracked.approximate:
            return [] if meta is None else [meta]
        if loaded is None or loaded.kept is None:
            return []
        tracked.kept = self.lookups.rows_of(meta, loaded.kept)
        return tracked.kept

    def take(self) -> list[Save]:
        """This step's orders."""
        orders, self._orders = self._orders, []
        return orders

    def heard(self, chunk_id: str, problem: str) -> None:
        """A rank has stored its part of a chunk, or has not, and why."""
        problems = self._heard.add(chunk_id, problem)
        if problems is None:
            return
        meta = self.pending.pop(chunk_id, None)
        why = next(filter(None, problems), "")
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

    def outdate(self) -> None:
        """The weights may have changed: what is under way is not indexed."""
        self._outdated.update(self.pending)

    def of_no_use(self, tracked: Tracked) -> str:
        """Why a request's state is neither stored nor put together from what is stored; empty if it may be."""
        if self.generations.problem:
            return self.generations.problem
        return "" if tracked.generation == self.generations.number else RESET
