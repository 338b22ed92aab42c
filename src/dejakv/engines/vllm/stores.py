"""Stores behind a connector.

Scheduler side and worker side each open the store. On disk they share the folder, and each rank of
a tensor-parallel engine has a folder of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.vllm.ranks import is_apart
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError
from dejakv.identity import MediumSpan
from dejakv.settings import in_bucket
from dejakv.store.base import PrefixHit, Rows, StateInfo, StoreStats
from dejakv.store.budgets import Admission, Budget
from dejakv.store.open import open_bucket, store_of
from dejakv.store.remote.tiers import TieredObjects
from dejakv.store.store import Store


class _SharedStore(Store):
    """Store that both sides of one connector share in one process; the last of them closes it.

    It is in memory, or in a bucket without a folder for its index.
    """

    def __init__(self, settings: ConnectorSettings, rules: Admission) -> None:
        objects = feed = None
        if settings.store is not None and in_bucket(settings.store):
            service, feed = open_bucket(settings.store, settings.feed, settings.compress)
            objects = TieredObjects(service, settings.memory_bytes, "read")

        super().__init__(
            objects,
            budget=Budget(settings.max_bytes, policy=settings.policy),
            admission=rules,
            feed=feed,
        )
        self.holders = 0

    def close(self) -> None:
        """Close the store when its last holder closes it."""
        self.holders -= 1
        if self.holders <= 0:
            super().close()


_shared: dict[str, _SharedStore] = {}
"""The shared stores of this process, by vLLM's engine id."""


def open_store(settings: ConnectorSettings, vllm_config: Any, *, writing: bool = False) -> Store:
    """Open the store that the settings name.

    Parameters
    ----------
    settings : ConnectorSettings
        Settings of one rank.
    vllm_config : VllmConfig
        vLLM's settings, for the engine id and the place of the worker.
    writing : bool
        Whether this side writes. That side applies the rules of admission and holds some of what is
        on disk in memory too.

    Raises
    ------
    StoreError
        The place cannot be used.
    ConfigError
        A store in memory would be another one in the worker's process.
    """
    config = settings.cache_config()
    if config.own_folder is not None:
        # Most prompts are never asked for again: only what is read is worth a place in memory.
        if writing:
            return store_of(config, memory_fill="read")
        # The scheduler's side reads descriptions alone, and stores nothing.
        return store_of(
            replace(config, memory_bytes=0, second_sight=False, min_tokens=0, max_write_rate=0)
        )

    if is_apart(vllm_config):
        raise ConfigError(
            "the worker is a process of its own here, so the store must be on disk: set store to a "
            "folder, or disk_dir for a bucket"
        )

    rules = Admission(0, config.second_sight, config.max_write_rate)
    engine_id = vllm_config.kv_transfer_config.engine_id

    store = _shared.get(engine_id)
    # Without holders it is closed, and stays so.
    if store is None or store.holders <= 0:
        store = _shared[engine_id] = _SharedStore(settings, rules)

    store.holders += 1
    return store


class EveryRank(Store):
    """The scheduler's view of the ranks' stores: a state is there if every rank has its part.

    Nothing is read or written through it, since no process holds the heads of all ranks.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__()
        self._stores = tuple(stores)

    def find(
        self,
        partition: str,
        epoch: str,
        token_ids: Sequence[int],
        spans: Sequence[MediumSpan] = (),
        *,
        whole: bool = False,
    ) -> tuple[PrefixHit, StateInfo] | None:
        """Find the longest prefix that every rank stores; None without any."""
        rank_hits = [
            store.find(partition, epoch, token_ids, spans, whole=whole) for store in self._stores
        ]
        # A rank may have stored more of a prompt than others, so the shortest hit counts.
        hits = [hit for hit in rank_hits if hit is not None]
        shortest_hit = (
            min(hits, key=lambda hit: hit[0].tokens) if len(hits) == len(rank_hits) else None
        )
        # The hit's donor may be evicted on another rank.
        return (
            shortest_hit
            if shortest_hit is not None and self.meta(shortest_hit[0].donor) is not None
            else None
        )

    def remote_read_seconds(self, id: str, rows: Rows | None = None) -> float:
        """Estimate the time of the slowest rank."""
        return max(store.remote_read_seconds(id, rows) for store in self._stores)

    def stats(self, partition: str | None = None, *, content: bool = True) -> StoreStats:
        """Return the figures of the first rank, whose services are the same as the others'."""
        return self._stores[0].stats(partition, content=content)

    def meta(self, id: str) -> StateInfo | None:
        """Return the description of a state that every rank stores; None without it."""
        first, *peers = self._stores
        meta = first.meta(id)
        return (
            meta
            if meta is not None and all(store.meta(id) is not None for store in peers)
            else None
        )

    def snapshots(self, partition: str, epoch: str) -> frozenset[str]:
        """Return the ids of snapshots that every rank stores."""
        ids = [store.snapshots(partition, epoch) for store in self._stores]
        return ids[0].intersection(*ids[1:])

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[StateInfo]:
        """Yield the descriptions of states that every rank stores."""
        first, *peers = self._stores
        # One pass over each rank's store in place of one query a prompt.
        peer_ids = [{meta.id for meta in store.metas(partition, epoch)} for store in peers]
        return (
            meta
            for meta in first.metas(partition, epoch)
            if all(meta.id in ids for ids in peer_ids)
        )

    def metas_since(self, mark: Any = None) -> tuple[list[StateInfo], Any]:
        """Return descriptions added since `mark`, and the next mark, as `Store.metas_since`.

        States that only some ranks have yet are checked again at the next call.
        """
        first, *peers = self._stores
        before, waiting = mark if mark is not None else (None, ())
        new, after = first.metas_since(before)

        complete = [
            meta
            for meta in [*waiting, *new]
            if all(store.meta(meta.id) is not None for store in peers)
        ]

        ids = {meta.id for meta in complete}
        return complete, (after, tuple(meta for meta in new if meta.id not in ids))

    def delete(self, id: str) -> bool:
        """Delete the state from every rank; return whether any had it."""
        # Not any(), which would stop at the first rank that has it.
        return max([store.delete(id) for store in self._stores])

    def listen(
        self,
        *,
        removed: Callable[[str], None] | None = None,
        arrived: Callable[[str], None] | None = None,
    ) -> None:
        """Call a function for what any rank removes; nothing arrives in the view itself."""
        for store in self._stores:
            store.listen(removed=removed)

    def flush(self) -> None:
        """Wait for every rank's store."""
        for store in self._stores:
            store.flush()

    def close(self) -> None:
        """Close every rank's store."""
        super().close()
        for store in self._stores:
            store.close()
