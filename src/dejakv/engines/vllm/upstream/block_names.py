# pyright: reportMissingImports=false
"""Names of blocks in vLLM's prefix cache, and the events that tell of them."""

from collections.abc import Callable, Iterator
from typing import Any


class RenamedBlocks:
    """Files one request's blocks from hash block `first` on under `name(hash)`.

    `KVCacheManager.allocate_slots` ends in `cache_blocks`, which files every full block under
    `Request.block_hashes`, those of the answer too, and a request finds blocks under its own
    hashes. Without other names approximate state would be served to exact requests. vLLM's hash of
    a block chains from the block before it (`Request._block_hasher`), so the request's own hashes
    are kept here.
    """

    def __init__(self, request: Any, first: int, name: Callable[[bytes], bytes]) -> None:
        self._name = name
        self._hashes, self._hasher = list(request.block_hashes), request._block_hasher
        request._block_hasher = self
        self.move(request, first)

    def __call__(self, request: Any) -> list[bytes]:
        """Hash the request's new full blocks, in place of vLLM's hasher."""
        # vLLM chains from the request's last hash, which must be its own one.
        names, request.block_hashes = request.block_hashes, self._hashes
        try:
            new = self._hasher(request)
        finally:
            request.block_hashes = names

        self._hashes += new
        return [self._name(block_hash) for block_hash in new]

    def move(self, request: Any, first: int) -> None:
        """File blocks from hash block `first` on under `name(hash)`, others under their hashes."""
        self.first = first
        request.block_hashes[:] = [*self._hashes[:first], *map(self._name, self._hashes[first:])]

    def restore(self, request: Any) -> None:
        """File all blocks under their own hashes; vLLM hashes the next ones."""
        request.block_hashes[:] = self._hashes
        request._block_hasher = self._hasher


def is_cached(kv_cache_manager: Any, block_hash: bytes) -> bool:
    """Tell whether vLLM's prefix cache has a block under this hash."""
    return kv_cache_manager.block_pool.get_cached_block(block_hash, [0]) is not None


def hide_events(kv_cache_manager: Any, hidden: Callable[[bytes | int], bool]) -> None:
    """Remove blocks whose hash is `hidden` from vLLM's published KV events.

    vLLM gathers events while it schedules and, for answers, after a step
    (`v1/core/sched/async_scheduler.py`). In an event hidden blocks come last, since a prompt's
    approximate blocks lie behind its exact ones.
    """
    pool = kv_cache_manager.block_pool
    take = pool.take_events

    def visible_events() -> Iterator[Any]:
        for event in take():
            # The event of a reset has no hashes.
            hashes = getattr(event, "block_hashes", [])
            visible_count = len(hashes) - sum(map(hidden, hashes))
            # Only an event of stored blocks has several: blocks are removed one by one.
            if 0 < visible_count < len(hashes):
                event.block_hashes = hashes[:visible_count]
                event.token_ids = event.token_ids[: visible_count * event.block_size]
                event.extra_keys = event.extra_keys and event.extra_keys[:visible_count]

            if visible_count or not hashes:
                yield event

    pool.take_events = lambda: list(visible_events())


def publishes_events(vllm_config: Any) -> bool:
    """Tell whether vLLM publishes KV events (`--kv-events-config`)."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and config.enable_kv_cache_events


def stored_event(
    kv_cache_config: Any,
    *,
    hashes: list[bytes],
    parent: bytes | None,
    medium: str,
    owner: str,
    **fields: Any,
) -> Any:
    """Make vLLM's event of stored blocks, as its own block pool does."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    shown: list[Any] = [maybe_convert_block_hash(each) for each in hashes]
    return BlockStored(
        block_hashes=shown,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        block_size=spec.block_size,
        medium=medium,
        group_idx=0,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        ownership=owner,
        **fields,
    )


def removed_event(hashes: list[bytes], *, medium: str, owner: str) -> Any:
    """Make vLLM's event of removed blocks."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    shown: list[Any] = [maybe_convert_block_hash(each) for each in hashes]
    return BlockRemoved(block_hashes=shown, medium=medium, group_idx=0, ownership=owner)


def watch_clears(kv_cache_manager: Any, cleared: Callable[[], None]) -> None:
    """Call `cleared` whenever vLLM publishes that all blocks are gone."""
    from vllm.distributed.kv_events import AllBlocksCleared

    pool = kv_cache_manager.block_pool
    take = pool.take_events

    def watched_events() -> list[Any]:
        events = take()
        if any(isinstance(event, AllBlocksCleared) for event in events):
            cleared()
        return events

    pool.take_events = watched_events
