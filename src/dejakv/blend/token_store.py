"""An online store of prompts for token-level reuse: least recently used prompts leave first.

store = LRUCacheStore(max_items=64)
key = store.put(make_item(engine, prepared, completion.capture()))
found = store.search(engine.embed_text("a similar prompt"), threshold=0.8)
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.embedding_map import with_positions
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, InputError
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.store import Store
from dejakv.vectors.base import normalized

KIND = "blend"


@dataclass(frozen=True)
class CacheItem:
    """One prompt.

    key        `p` and 16 hexadecimal digits, from the partition and the token ids
    embedding  pooled input embedding at length 1, `[hidden]`: what `search` compares
    e_cache    input embeddings `[tokens, hidden]`; `e_cache_rope` the same rotated to their positions. None if not kept
    kv         prefill state, stacked `[2, layers, kv_heads, tokens, head_dim]`
    """

    key: str
    prompt: str
    token_ids: tuple[int, ...]
    embedding: NDArray[np.float32] = field(repr=False)
    kv: Tensor = field(repr=False)
    e_cache: NDArray[np.float32] | None = field(default=None, repr=False)
    e_cache_rope: NDArray[np.float32] | None = field(default=None, repr=False)
    partition: str = "default"
    epoch: str = ""

    @property
    def nbytes(self) -> int:
        extra = sum(part.nbytes for part in (self.e_cache, self.e_cache_rope) if part is not None)
        return self.kv.nbytes + self.embedding.nbytes + extra

    def chunk(self) -> Chunk:
        """The item as the common store keeps it (and as `run_blend` takes a donor); the E-cache is made anew from the ids."""
        meta = ChunkMeta(
            self.key, self.partition, self.epoch, self.token_ids, self.prompt, self.prompt,
            kind=KIND, vectors={"pooled": self.embedding}, nbytes=self.kv.nbytes,
        )  # fmt: skip
        return Chunk(meta, self.kv)


def key_of(partition: str, token_ids: tuple[int, ...]) -> str:
    data = np.asarray(token_ids, dtype="<i8").tobytes()
    return "p" + hashlib.sha256(partition.encode() + b"\0" + data).hexdigest()[:16]


def make_item(engine: Any, prepared: Prepared, kv: Tensor, *, with_e_cache: bool = True) -> CacheItem:
    """An item of a computed prompt. Raises: InputError if the state has another number of tokens than the prompt."""
    ids = prepared.token_ids
    if kv.shape[3] != len(ids):
        raise InputError(
            f"the state holds {kv.shape[3]} tokens, the prompt {len(ids)}: capture it from the prompt's own run"
        )
    vectors = engine.embed_tokens(ids)
    pooled = normalized(vectors.mean(0, keepdims=True))[0]
    request = prepared.request
    return CacheItem(
        key_of(request.partition, ids), request.prompt, ids, pooled, kv,
        vectors if with_e_cache else None, with_positions(vectors) if with_e_cache else None,
        request.partition, engine.epoch,
    )  # fmt: skip


@dataclass(frozen=True)
class TokenStoreStats:
    entries: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class LRUCacheStore:
    """At most `max_items` prompts and `max_bytes` bytes (0: no limit), least recently used out first. Thread-safe.

    store  a common store that keeps items beyond this one's limits and over restarts; None for memory alone
    """

    def __init__(
        self, max_items: int = 64, max_bytes: int = 0, *, store: Store | None = None, partition: str = "default", epoch: str = ""
    ) -> None:  # fmt: skip
        if max_items < 1 or max_bytes < 0:
            raise ConfigError(f"max_items={max_items}, max_bytes={max_bytes}: give at least 1 item and 0 or more bytes")
        self.max_items, self.max_bytes = max_items, max_bytes
        self.partition, self.epoch = partition, epoch
        self._store = store
        self._items: OrderedDict[str, CacheItem] = OrderedDict()
        self._lock = threading.RLock()
        self._hits = self._misses = self._evictions = 0
        self._pooled: dict[str, NDArray[np.float32]] = {}
        if store is not None:
            for meta in store.metas(partition, epoch or None):
                if meta.kind == KIND and "pooled" in meta.vectors:
                    self._pooled[meta.id] = np.asarray(meta.vectors["pooled"], dtype=np.float32)
            store.on_evict(self._forget)

    def put(self, item: CacheItem) -> str:
        """Keeps an item as the most recently used and returns its key. An item larger than the byte limit is not kept.

        Raises: InputError for an item of another partition or of another model than the items here.
        """
        if item.partition != self.partition or (self.epoch and item.epoch != self.epoch):
            raise InputError(f"item {item.key} belongs to another partition or model: use a store of its own for each")
        with self._lock:
            if self.max_bytes and item.nbytes > self.max_bytes:
                return item.key
            self._items.pop(item.key, None)
            self._items[item.key] = item
            self._pooled[item.key] = item.embedding
            while len(self._items) > self.max_items or (self.max_bytes and self._bytes() > self.max_bytes):
                old, _ = self._items.popitem(last=False)
                self._evictions += 1
                if self._store is None:
                    self._pooled.pop(old, None)
        if self._store is not None:
            self._store.put(item.chunk())
        return item.key

    def get(self, key: str) -> CacheItem | None:
        """The item, now the most recently used; None (a miss) for an unknown or foreign key."""
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
                self._hits += 1
                return item
        item = self._load(key)
        with self._lock:
            self._hits += item is not None
            self._misses += item is None
        return item

    def search(self, embedding: NDArray[np.float32], threshold: float = 0.8) -> tuple[CacheItem, float] | None:
        """The item whose pooled embedding is nearest, and its cosine, if that is at least the threshold.

        Raises: ConfigError for a threshold that is no cosine, InputError for a vector of another length.
        """
        if not -1.0 <= threshold <= 1.0:
            raise ConfigError(f"sim_threshold={threshold} is no cosine: give a number from -1 to 1")
        with self._lock:
            keys = list(self._pooled)
            table = np.stack([self._pooled[key] for key in keys]) if keys else np.zeros((0, len(embedding)), np.float32)
        if not keys:
            self._miss()
            return None
        if table.shape[1] != len(embedding):
            raise InputError(
                f"an embedding of {len(embedding)} numbers cannot be compared with items of {table.shape[1]}"
            )
        scores = table @ normalized(np.asarray(embedding, dtype=np.float32)[None])[0]
        for place in np.argsort(-scores):
            if scores[place] < threshold:
                break
            item = self.get(keys[place])
            if item is not None:
                return item, float(scores[place])
        self._miss()
        return None

    def items(self) -> Iterator[CacheItem]:
        """Items in memory, least recently used first."""
        with self._lock:
            held = list(self._items.values())
        return iter(held)

    def stats(self) -> TokenStoreStats:
        with self._lock:
            return TokenStoreStats(len(self._items), self._bytes(), self._hits, self._misses, self._evictions)

    def clear(self) -> int:
        """Forgets everything of this partition, on disk too; how many items there were."""
        with self._lock:
            keys = list(self._pooled)
            self._items.clear()
            self._pooled.clear()
        if self._store is not None:
            for key in keys:
                self._store.delete(key)
        return len(keys)

    def __len__(self) -> int:
        return len(self._items)

    def _bytes(self) -> int:
        return sum(item.nbytes for item in self._items.values())

    def _miss(self) -> None:
        with self._lock:
            self._misses += 1

    def _forget(self, key: str) -> None:
        with self._lock:
            if key not in self._items:
                self._pooled.pop(key, None)

    def _load(self, key: str) -> CacheItem | None:
        if self._store is None or key not in self._pooled:
            return None
        chunk = self._store.get(key)
        if chunk is None or chunk.meta.partition != self.partition:
            return None
        meta = chunk.meta
        return CacheItem(
            key, meta.prompt, meta.token_ids, np.asarray(meta.vectors["pooled"], dtype=np.float32), chunk.tensor,
            partition=meta.partition, epoch=meta.epoch,
        )  # fmt: skip
