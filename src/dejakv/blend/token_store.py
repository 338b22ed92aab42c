"""In-memory LRU store of prompts for token-level reuse, as SemanticShareKV has it.

store = LRUCacheStore(max_items=64)
key = store.put(make_item(engine, prepared, completion.capture()))
blended = engine.blend(other, [store.get(key).chunk])
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, InputError
from dejakv.identity import exact_key
from dejakv.store.base import ChunkMeta, StoredState, Tensor
from dejakv.vectors.base import normalized


@dataclass(frozen=True)
class CacheItem:
    """One prompt.

    chunk      the prompt with its prefill state: a donor for `engine.blend`
    embedding  mean of the input embeddings at length 1, `[hidden]`, to compare prompts by
    """

    chunk: StoredState
    embedding: NDArray[np.float32] = field(repr=False)

    @property
    def key(self) -> str:
        """Id of the chunk, by partition, model and token ids."""
        return self.chunk.meta.id


def make_item(engine: Any, prepared: Prepared, kv: Tensor) -> CacheItem:
    """Make an item of a computed prompt. Raises: InputError if state and prompt differ in tokens."""
    ids, request = prepared.token_ids, prepared.request
    if kv.shape[3] != len(ids):
        raise InputError(
            f"the state holds {kv.shape[3]} tokens, the prompt {len(ids)}: capture it from the prompt's own run"
        )
    key = exact_key(request.partition, engine.epoch, ids, ())
    meta = ChunkMeta(key, request.partition, engine.epoch, ids, request.prompt, request.chunk, nbytes=kv.nbytes)
    return CacheItem(StoredState(meta, kv), normalized(engine.embed_tokens(ids).mean(0)))


class LRUCacheStore:
    """At most `max_items` prompts, least recently used out first. Not thread-safe.

    A `HierarchicalCache` does the same behind requests, for partitions and on disk: `--reuse blend --cache-dir DIR`.
    """

    def __init__(self, max_items: int = 64) -> None:
        if max_items < 1:
            raise ConfigError(f"max_items={max_items}: give at least 1 item")
        self.max_items = max_items
        self._items: OrderedDict[str, CacheItem] = OrderedDict()

    def put(self, item: CacheItem) -> str:
        """Store an item as the most recently used and return its key."""
        self._items[item.key] = item
        self._items.move_to_end(item.key)
        if len(self._items) > self.max_items:
            self._items.popitem(last=False)
        return item.key

    def get(self, key: str) -> CacheItem | None:
        """Return an item and mark it as used; None for an unknown key."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def items(self) -> Iterator[CacheItem]:
        """The items, least recently used first."""
        return iter(list(self._items.values()))
