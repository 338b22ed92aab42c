"""Cache of tasks: prompts with the top layer's KV, searched by an embedding."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.tensors import tensor_view, to_store
from dejakv.errors import ConfigError, InputError
from dejakv.identity import digest_of
from dejakv.prototypes.lsh import LSHIndex
from dejakv.request import DEFAULT_PARTITION
from dejakv.store.base import StateInfo, StoredState
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.vectors.base import Vector, unit_vector

KIND = LAYER = "task"
"""Kind of the stored state, and name of its vector.

No level takes state of this kind for a prompt's exact state.
"""

CANDIDATES = 4
"""Tasks that a search looks at."""


@dataclass(frozen=True)
class TaskCacheEntry:
    """Task as `InterTaskKVManager` hands it out.

    Attributes
    ----------
    task_id : str
        Name of the task.
    task_embedding : NDArray, shape [dim]
        Float32 of length 1.
    lsh_hash : str
        The embedding's bucket, characters 0 and 1.
    top_layer_kv : tuple[Tensor, Tensor]
        Keys and values, each [layers, kv heads, tokens, head dim], keys rotated for positions
        0..tokens-1. In a model without ordinary layers on top, `layers` is 1.
    timestamp : float
        Seconds since 1970 at which it was added.
    token_ids : tuple[int, ...]
        The task's prompt; empty if it was added without.
    similarity : float
        Cosine with the query that found it; 1.0 from `add_task`.
    """

    task_id: str
    task_embedding: NDArray[np.float32] = field(repr=False)
    lsh_hash: str
    top_layer_kv: tuple[torch.Tensor, torch.Tensor] = field(repr=False)
    timestamp: float
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    similarity: float = 1.0

    @property
    def tokens(self) -> int:
        """Number of tokens with state."""
        return self.top_layer_kv[0].shape[-2]


class InterTaskKVManager:
    """Tasks by embedding, where the least recently used leave first. Thread-safe.

    Parameters
    ----------
    embedding_dim : int
        Components of a task's embedding.
    max_cache_size : int
        Maximum number of tasks.
    similarity_threshold : float
        Least cosine of a donor.
    num_hyperplanes : int
        Characters of a task's hash.
    device : str
        Where `top_layer_kv` of entries is handed out; `auto`: CUDA where there is one.
    epoch : str
        Fingerprint of the model: tasks of another one are never found.
    partition : str
        Partition of the tasks.
    store : Store, optional
        Store of the tasks; None: memory of this process. A store on disk keeps them over a restart
        and shares them. Its budget is its own then, and `max_cache_size` does not count.
    seed : int
        Seed of the hyperplanes.

    Raises
    ------
    ConfigError
        For a setting out of range.
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
            raise ConfigError(
                f"embedding_dim={embedding_dim} is no dimension: give the length of a task's "
                "embedding"
            )

        self.embedding_dim, self.partition = embedding_dim, partition
        self.similarity_threshold = similarity_threshold
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self.store = open_store(max_entries=max_cache_size) if store is None else store

        # Hashes must be equal in all indexes, so the seed is fixed.
        self._new_index = lambda: LSHIndex(embedding_dim, num_hyperplanes, seed)
        self._index = self._new_index()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        # The store evicts by its own budget, and the index must not outlive an entry.
        self.store.listen(removed=self._forget)
        self._epoch: str | None = None
        self.epoch = epoch

    @property
    def similarity_threshold(self) -> float:
        """Least cosine of a donor. Setting it raises ConfigError outside of [-1, 1]."""
        return self._threshold

    @similarity_threshold.setter
    def similarity_threshold(self, value: float) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -1.0 <= value <= 1.0
        ):
            raise ConfigError(
                f"similarity_threshold={value!r} is no cosine: give a number from -1 to 1 (0.8 is "
                "usual)"
            )

        self._threshold = float(value)

    @property
    def epoch(self) -> str:
        """Fingerprint of the donors' model. Setting it indexes the stored tasks of that model."""
        return self._epoch or ""

    @epoch.setter
    def epoch(self, value: str) -> None:
        if value == self._epoch:
            return
        # Filled before it takes the old one's place: searches go on meanwhile.
        self._epoch, index = value, self._new_index()
        for meta in self.store.metas(self.partition):
            # A shared store has prompts' state of other kinds, too.
            if (meta.kind, meta.epoch) == (KIND, value) and LAYER in meta.vectors:
                index.add(meta.id, meta.vectors[LAYER])

        with self._lock:
            self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def search_similar_task(
        self, query_embedding: Any, useful: Callable[[tuple[int, ...]], bool] | None = None
    ) -> TaskCacheEntry | None:
        """Search the most similar task at or above the threshold.

        Parameters
        ----------
        query_embedding : array_like, shape [dim]
            Numpy or torch.
        useful : Callable, optional
            Whether a task of these token ids may be returned; None: any.

        Returns
        -------
        TaskCacheEntry or None
            The task; None without one.

        Raises
        ------
        ConfigError
            If the embedding has another dimension.
        InputError
            If the embedding has no direction.
        """
        vector = self._vector(query_embedding)
        with self._lock:
            hits = self._index.search(vector, CANDIDATES, self.similarity_threshold)

        # Best first, so that the first useful task is the most similar one.
        for id, cosine in hits:
            meta = self.store.meta(id)
            if meta is not None and useful is not None and not useful(meta.token_ids):
                continue
            if (stored_state := self.store.get(id)) is not None:
                self._count("hits")
                return self._entry(stored_state, cosine)

            # Gone, or damaged: the store has counted it.
            self._forget(id)

        self._count("misses")
        return None

    def add_task(
        self,
        task_id: str,
        task_embedding: Any,
        top_layer_kv: Any,
        *,
        token_ids: tuple[int, ...] = (),
        text: str = "",
    ) -> TaskCacheEntry | None:
        """Keep a task, in place of an earlier one of the same id.

        Parameters
        ----------
        task_id : str
            Name of the task.
        task_embedding : array_like, shape [dim]
            Numpy or torch.
        top_layer_kv : tuple[Tensor, Tensor]
            Keys and values [layers, kv heads, tokens, head dim], keys rotated for positions
            0..tokens-1.
        token_ids : tuple[int, ...]
            The task's prompt.
        text : str
            Its text.

        Returns
        -------
        TaskCacheEntry or None
            The task; None if the store refused it (its log says why).

        Raises
        ------
        ConfigError
            For an embedding of another dimension.
        InputError
            For state of another shape.
        """
        vector = self._vector(task_embedding)
        keys, values = _checked(top_layer_kv, len(token_ids))
        stacked = to_store(torch.stack([keys, values]).detach().cpu().contiguous())
        meta = StateInfo(
            # With partition and epoch: the same name elsewhere is another task.
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

        if not self.store.put(stored_state := StoredState(meta, stacked)):
            self._count("refused")
            return None

        with self._lock:
            self._index.add(meta.id, vector)
        # Evicted by another thread before it was indexed.
        if self.store.meta(meta.id) is None:
            self._forget(meta.id)
        self._count("added")
        return self._entry(stored_state, 1.0)

    def get_statistics(self) -> dict[str, Any]:
        """Return the cache's figures.

        They are entries, bytes, hits, misses, hit_rate (0 before the first search), added, refused,
        evictions and threshold.
        """
        store_stats, counts = self.store.stats(self.partition), self._counts
        searched = counts["hits"] + counts["misses"]
        return {
            "entries": store_stats.entries,
            "bytes": store_stats.bytes,
            "hits": counts["hits"],
            "misses": counts["misses"],
            "hit_rate": counts["hits"] / searched if searched else 0.0,
            "added": counts["added"],
            "refused": counts["refused"],
            "evictions": sum(store_stats.evictions.values()),
            "threshold": self.similarity_threshold,
        }

    def reset(self) -> None:
        """Forget the tasks of this partition, and the counters."""
        # Outside of the lock, which `_forget` takes for each removed entry.
        self.store.clear(self.partition)
        with self._lock:
            self._counts.clear()

    def generate_task_id(self, input_text: str) -> str:
        """Return 16 hexadecimal digits; equal texts have equal ids."""
        return digest_of("task id", input_text)[:16]

    def _vector(self, embedding: Any) -> Vector:
        if hasattr(embedding, "detach"):
            embedding = embedding.detach().float().cpu().numpy()
        return unit_vector(
            np.asarray(embedding, np.float32), self.embedding_dim, "the cache of tasks"
        )

    def _forget(self, id: str) -> None:
        with self._lock:
            self._index.remove(id)

    def _entry(self, stored_state: StoredState, similarity: float) -> TaskCacheEntry:
        meta, vector = stored_state.meta, stored_state.meta.vectors[LAYER]
        stacked = tensor_view(stored_state.tensor).to(self.device)
        hashed = self._index.compute_hash(vector)
        task_id = str(meta.metadata["task"])
        return TaskCacheEntry(
            task_id,
            vector,
            hashed,
            (stacked[0], stacked[1]),
            meta.created,
            meta.token_ids,
            similarity,
        )

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _checked(top_layer_kv: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = top_layer_kv
    if keys.dim() != 4 or keys.shape != values.shape or (tokens and keys.shape[2] != tokens):
        raise InputError(
            f"state of shapes {tuple(keys.shape)} and {tuple(values.shape)} for a task of "
            f"{tokens or '?'} tokens: give "
            "keys and values of equal shape [layers, kv heads, tokens, head dim]"
        )

    return keys, values
