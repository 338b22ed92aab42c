"""In-memory LRU store of prompts for token-level reuse.

store = LRUCacheStore(max_items=64)
key = store.put(make_item(engine, prepared, completion.capture()))
found = store.search(engine.embed_tokens(other.token_ids).mean(0), threshold=0.8)
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, InputError
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.vectors.base import normalized


@dataclass(frozen=True)
class CacheItem:
    """One prompt.

    key        `p` and 16 hexadecimal digits, from the partition and the token ids
    embedding  mean of the input embeddings at length 1, `[hidden]`, for `search`
    kv         prefill state, stacked `[2, layers, kv_heads, tokens, head_dim]`
    """

    key: str
    prompt: str
    token_ids: tuple[int, ...]
    embedding: NDArray[np.float32] = field(repr=False)
    kv: Tensor = field(repr=False)
    partition: str = "default"
    epoch: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the embedding."""
        return self.kv.nbytes + self.embedding.nbytes

    def chunk(self) -> Chunk:
        """The item as a donor for `engine.blend`."""
        meta = ChunkMeta(
            self.key, self.partition, self.epoch, self.token_ids, self.prompt, self.prompt, nbytes=self.kv.nbytes
        )
        return Chunk(meta, self.kv)


def key_of(partition: str, token_ids: tuple[int, ...]) -> str:
    """Key of a prompt in a partition."""
    data = np.asarray(token_ids, dtype="<i8").tobytes()
    return "p" + hashlib.sha256(partition.encode() + b"\0" + data).hexdigest()[:16]


def make_item(engine: Any, prepared: Prepared, kv: Tensor) -> CacheItem:
    """Make an item of a computed prompt. Raises: InputError if state and prompt differ in tokens."""
    ids, request = prepared.token_ids, prepared.request
    if kv.shape[3] != len(ids):
        raise InputError(
            f"the state holds {kv.shape[3]} tokens, the prompt {len(ids)}: capture it from the prompt's own run"
        )
    pooled = normalized(engine.embed_tokens(ids).mean(0, keepdims=True))[0]
    return CacheItem(key_of(request.partition, ids), request.prompt, ids, pooled, kv, request.partition, engine.epoch)


class LRUCacheStore:
    """Store of at most `max_items` prompts of one partition and model, least recently used out first. Not thread-safe.

    A `HierarchicalCache` does the same behind requests and on disk: `--reuse blend --cache-dir DIR`.
    """

    def __init__(self, max_items: int = 64, *, partition: str = "default", epoch: str = "") -> None:
        if max_items < 1:
            raise ConfigError(f"max_items={max_items}: give at least 1 item")
        self.max_items, self.partition, self.epoch = max_items, partition, epoch
        self._items: OrderedDict[str, CacheItem] = OrderedDict()

    def put(self, item: CacheItem) -> str:
        """Store an item as the most recently used and return its key.

        Raises: InputError for an item of another partition or model.
        """
        if item.partition != self.partition or (self.epoch and item.epoch != self.epoch):
            raise InputError(f"item {item.key} belongs to another partition or model: use a store of its own for each")
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

    def search(self, embedding: NDArray[np.float32], threshold: float = 0.8) -> tuple[CacheItem, float] | None:
        """Return the item with the nearest embedding and its cosine, and mark it as used; None below the threshold.

        Raises: ConfigError for a threshold outside [-1, 1], InputError for a vector of another length.
        """
        if not -1.0 <= threshold <= 1.0:
            raise ConfigError(f"sim_threshold={threshold} is no cosine: give a number from -1 to 1")
        if not self._items:
            return None
        table = np.stack([item.embedding for item in self._items.values()])
        if table.shape[1] != len(embedding):
            raise InputError(
                f"an embedding of {len(embedding)} numbers cannot be compared with items of {table.shape[1]}"
            )
        scores = table @ normalized(np.asarray(embedding, dtype=np.float32)[None])[0]
        best = int(scores.argmax())
        if scores[best] < threshold:
            return None
        item = list(self._items.values())[best]
        self._items.move_to_end(item.key)
        return item, float(scores[best])

    def items(self) -> Iterator[CacheItem]:
        """The items, least recently used first."""
        return iter(list(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)
