"""Tensor parallelism: every rank computes some of the heads, in a process of its own, and stores them in a folder of its own.

A chunk is there only if every rank has its part: it is indexed when the last one confirmed it, and what one lost is a miss for
all. A load that fails on one rank fails as a whole (vLLM's `KVOutputAggregator` sees to the blocks).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.identity import Span
from dejakv.store.base import Chunk, ChunkMeta, PrefixHit, Rows, StoreStats
from dejakv.store.selection import Purged, Selection
from dejakv.store.store import Store

Answer = TypeVar("Answer")


def rank_count(vllm_config: Any) -> int:
    """How many ranks hold a part of each chunk."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def settings_of_rank(settings: ConnectorSettings, rank: int, ranks: int) -> ConnectorSettings:
    """One rank's settings: its folder below `store_dir`, and its share of budgets that are meant for all. A single rank has all."""
    if ranks == 1:
        return settings
    folder = None if settings.store_dir is None else str(Path(settings.store_dir) / f"tp-{rank}-of-{ranks}")

    def share(limit: int) -> int:
        return max(1, limit // ranks) if limit else 0

    return replace(
        settings,
        store_dir=folder,
        max_bytes=share(settings.max_bytes),
        memory_bytes=share(settings.memory_bytes),
        max_write_rate=share(settings.max_write_rate),
        max_pending_bytes=share(settings.max_pending_bytes),
    )


class Answers(Generic[Answer]):
    """Collects what the ranks say about one order, since they need not say it in the same step."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._heard: dict[str, list[Answer]] = {}

    def add(self, order: str, answer: Answer) -> list[Answer] | None:
        """All ranks' answers with the last one's, None before it. A rank answers each order once."""
        heard = self._heard.setdefault(order, [])
        heard.append(answer)
        return self._heard.pop(order) if len(heard) == self._ranks else None


class EveryRank(Store):
    """The scheduler's view of the ranks' stores: a chunk is there if every rank has its part.

    Nothing is read or written through it, since no process holds the heads of all ranks; `delete` and `clear` go to all.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__()
        self._stores = tuple(stores)

    def put(self, chunk: Chunk) -> bool:
        """Refused: a rank's worker stores its own part."""
        return False

    def get_parts(self, id: str, rows: Rows | None = None) -> None:
        """None: a rank's worker reads its own part."""

    def find(
        self, partition: str, epoch: str, token_ids: Sequence[int], spans: Sequence[Span] = (), *, whole: bool = False
    ) -> tuple[PrefixHit, ChunkMeta] | None:
        """The prefix that every rank has, of a prompt that is there."""
        found = [store.find(partition, epoch, token_ids, spans, whole=whole) for store in self._stores]
        hits = [hit for hit in found if hit is not None and self.meta(hit[0].donor) is not None]
        return min(hits, key=lambda hit: hit[0].tokens) if len(hits) == len(found) else None

    def meta(self, id: str) -> ChunkMeta | None:
        first, *others = self._stores
        meta = first.meta(id)
        return meta if meta is not None and all(store.meta(id) is not None for store in others) else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        first, *others = self._stores
        held = [{meta.id for meta in store.metas(partition, epoch)} for store in others]
        return (meta for meta in first.metas(partition, epoch) if all(meta.id in ids for ids in held))

    def added(self, mark: Any = None) -> tuple[list[ChunkMeta], Any]:
        """See `Store.added`. What only some ranks have yet is looked at once more with the next call."""
        first, *others = self._stores
        before, waiting = mark if mark is not None else (None, ())
        new, after = first.added(before)
        there = [meta for meta in [*waiting, *new] if all(store.meta(meta.id) is not None for store in others)]
        ids = {meta.id for meta in there}
        return there, (after, tuple(meta for meta in new if meta.id not in ids))

    def delete(self, id: str) -> bool:
        return max([store.delete(id) for store in self._stores])

    def clear(self, partition: str | None = None) -> int:
        return max([store.clear(partition) for store in self._stores])

    def stats(self, partition: str | None = None) -> StoreStats:
        """`bytes` are all ranks', `entries` those of the rank that has fewest."""
        stats = [store.stats(partition) for store in self._stores]
        return StoreStats(entries=min(one.entries for one in stats), bytes=sum(one.bytes for one in stats))

    def on_evict(self, listener: Callable[[str], None]) -> None:
        for store in self._stores:
            store.on_evict(listener)

    def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """What was removed from the first rank's store; it is removed from all."""
        first, *_ = [store.purge(selection, dry_run=dry_run) for store in self._stores]
        return first

    def flush(self) -> None:
        for store in self._stores:
            store.flush()

    def close(self) -> None:
        super().close()
        for store in self._stores:
            store.close()
