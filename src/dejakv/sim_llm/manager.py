"""The cache of tasks: a level and a store of the common core, in terms of tasks."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dejakv.engines.tensors import borrowed, to_store
from dejakv.errors import ConfigError, InputError
from dejakv.identity import digest_of
from dejakv.index.base import Vector, unit
from dejakv.levels.base import Query
from dejakv.request import DEFAULT_PARTITION, Request
from dejakv.sim_llm.entry import TaskCacheEntry
from dejakv.sim_llm.level import LAYER, TaskLevel
from dejakv.store.base import Chunk, ChunkMeta, Store, Tensor
from dejakv.store.memory import MemoryStore

Judge = Callable[[tuple[int, ...], float], float]

KIND = "task"
"""Kind of the chunks: no level takes them for a prompt's exact state."""


def check_threshold(value: float) -> float:
    """Raises: ConfigError for what is no cosine."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1.0 <= value <= 1.0:
        raise ConfigError(f"similarity_threshold={value!r} is no cosine: give a number from -1 to 1 (0.8 is usual)")
    return float(value)


class InterTaskKVManager:
    """Tasks by embedding, the least recently used leave first. Thread-safe.

    max_cache_size  tasks held at most
    device          where `top_layer_kv` of entries is handed out; `auto`: CUDA where there is one
    epoch           fingerprint of the model: tasks of another one are never found
    store           keeps the tasks; None: memory of this process. A store on disk keeps them over a restart and
                    shares them. Its budget is its own then, and `max_cache_size` does not count
    """

    def __init__(
        self,
        embedding_dim: int = 4096,
        max_cache_size: int = 100,
        similarity_threshold: float = 0.8,
        num_hyperplanes: int = 16,
        device: str = "auto",
        *,
        epoch: str = "",
        partition: str = DEFAULT_PARTITION,
        store: Store | None = None,
        seed: int = 42,
    ) -> None:
        if max_cache_size < 1:
            raise ConfigError(f"max_cache_size={max_cache_size} holds no task: give at least 1")
        if embedding_dim < 1:
            raise ConfigError(f"embedding_dim={embedding_dim} is no dimension: give the length of a task's embedding")
        self.embedding_dim, self.epoch, self.partition = embedding_dim, epoch, partition
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.level = TaskLevel(embedding_dim, num_hyperplanes, seed, check_threshold(similarity_threshold))
        self.store = MemoryStore(max_entries=max_cache_size) if store is None else store
        self.store.on_evict(self.level.remove)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        for meta in self.store.metas(partition):
            if meta.kind == KIND:
                self.level.add(meta.id, self._query(meta.vectors.get(LAYER), meta.epoch))

    @property
    def similarity_threshold(self) -> float:
        return self.level.threshold

    @similarity_threshold.setter
    def similarity_threshold(self, value: float) -> None:
        self.level.threshold = check_threshold(value)

    def search_similar_task(self, query_embedding: Any, judge: Judge | None = None) -> TaskCacheEntry | None:
        """The most similar task at or above the threshold, None without one.

        query_embedding  [dim], numpy or torch. Raises: ConfigError for another dimension, InputError without a direction
        judge            the similarity that counts, from a candidate's token ids and its cosine; None: the cosine
        """
        vector = self._vector(query_embedding)
        best: tuple[float, Chunk] | None = None
        for match in self.level.search(self._query(vector, self.epoch)).matches:
            meta = self.store.meta(match.donor)
            score = match.score if judge is None or meta is None else judge(meta.token_ids, match.score)
            if score < self.similarity_threshold or (best is not None and score <= best[0]):
                continue
            chunk = self.store.get(match.donor)
            if chunk is None:  # gone, or damaged: the store has counted it
                self.level.remove(match.donor)
            else:
                best = score, chunk
        self._count("misses" if best is None else "hits")
        return self._entry(best[1], best[0]) if best is not None else None

    def add_task(
        self, task_id: str, task_embedding: Any, top_layer_kv: Any, *, token_ids: tuple[int, ...] = (), text: str = ""
    ) -> TaskCacheEntry | None:
        """Keeps a task, in place of an earlier one of the same id. None if the store refused it (its log says why).

        top_layer_kv  keys and values [layers, kv heads, tokens, head dim], keys rotated for positions 0..tokens-1
        Raises: ConfigError for an embedding of another dimension, InputError for state of another shape
        """
        vector = self._vector(task_embedding)
        keys, values = _checked(top_layer_kv, len(token_ids))
        stacked = to_store(torch.stack([keys, values]).detach().cpu().contiguous())
        meta = ChunkMeta(
            id=digest_of("task", self.partition, self.epoch, task_id)[:40],
            partition=self.partition,
            epoch=self.epoch,
            token_ids=tuple(token_ids),
            prompt=text,
            chunk=text,
            kind=KIND,
            vectors={LAYER: vector},
            created=time.time(),
            nbytes=stacked.nbytes,
            metadata={"task": task_id},
        )
        if not self.store.put(chunk := Chunk(meta, stacked)):
            self._count("refused")
            return None
        self.level.add(meta.id, self._query(vector, self.epoch))
        if self.store.meta(meta.id) is None:  # evicted by another thread before it was indexed
            self.level.remove(meta.id)
        self._count("added")
        return self._entry(chunk, 1.0)

    def get_statistics(self) -> dict[str, Any]:
        """entries, bytes, hits, misses, hit_rate (0 before the first search), added, refused, evictions, threshold."""
        held, counts = self.store.stats(self.partition), self._counts
        searched = counts["hits"] + counts["misses"]
        return {
            "entries": held.entries,
            "bytes": held.bytes,
            "hits": counts["hits"],
            "misses": counts["misses"],
            "hit_rate": counts["hits"] / searched if searched else 0.0,
            "added": counts["added"],
            "refused": counts["refused"],
            "evictions": sum(held.evictions.values()),
            "threshold": self.similarity_threshold,
        }

    def reset(self) -> None:
        """Forgets the tasks of this partition, and the counters."""
        self.store.clear(self.partition)
        with self._lock:
            self._counts.clear()

    def generate_task_id(self, input_text: str) -> str:
        """16 hexadecimal digits; equal texts have equal ids."""
        return digest_of("task id", input_text)[:16]

    def _vector(self, embedding: Any) -> Vector:
        if hasattr(embedding, "detach"):
            embedding = embedding.detach().float().cpu().numpy()
        return unit(np.asarray(embedding, np.float32), self.embedding_dim, "the cache of tasks")

    def _query(self, vector: Vector | None, epoch: str) -> Query:
        request = Request(id="", prompt="", chunk="", partition=self.partition)
        return Query(request, digest_of(self.partition, epoch), lambda: {} if vector is None else {LAYER: vector})

    def _entry(self, chunk: Chunk, similarity: float) -> TaskCacheEntry:
        meta, vector = chunk.meta, chunk.meta.vectors[LAYER]
        stacked = borrowed(Tensor(chunk.tensor.data, chunk.tensor.dtype)).to(self.device)
        hashed = self.level.index.compute_hash(vector)
        task_id = str(meta.metadata["task"])
        return TaskCacheEntry(
            task_id, vector, hashed, (stacked[0], stacked[1]), meta.created, meta.token_ids, similarity
        )

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _checked(top_layer_kv: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = top_layer_kv
    if keys.dim() != 4 or keys.shape != values.shape or (tokens and keys.shape[2] != tokens):
        raise InputError(
            f"state of shapes {tuple(keys.shape)} and {tuple(values.shape)} for a task of {tokens or '?'} tokens: give "
            "keys and values of equal shape [layers, kv heads, tokens, head dim]"
        )
    return keys, values
