"""The prototypes' names for values that have other names here, for code that was written for them.

    from dejakv.prototypes import KVChunk, SemanticTextMatch, VisualCacheResult

docs/prototypes/index.md lists every name of the prototypes, those without an alias with what replaces them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from dejakv.decide.levels.base import Match, Status
from dejakv.decide.plan import Decision
from dejakv.encoder_cache import QueueingController as QueueingController
from dejakv.encoder_cache import VisualCacheResult as VisualCacheResult
from dejakv.store.base import StoredState

SemanticTextMatch = EmbeddingMatch = CacheHit = Match
"""What a level's `search` returns: `.chunk_id`, `.score` and, of latent layers, `.layer`."""


@dataclass(frozen=True)
class KVChunk:
    """A stored chunk as the prototype showed it: the K and V of a prompt, without the engine's block numbers."""

    chunk: StoredState

    @property
    def chunk_id(self) -> str:
        return self.chunk.meta.id

    @property
    def num_tokens(self) -> int:
        return self.chunk.meta.num_tokens

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """`layer_0`, `layer_1`, ...: `[2 (K, V), kv_heads, tokens, head_dim]`."""
        data = self.chunk.tensor.data
        return {f"layer_{index}": data[:, index] for index in range(data.shape[1])}


@dataclass(frozen=True)
class ReuseReport:
    """A decision of `HierarchicalCache.find` as the prototype's `try_reuse` returned it."""

    hit: Match | None
    statuses: Mapping[str, Status]

    @classmethod
    def of(cls, decision: Decision) -> "ReuseReport":
        """Convert a decision. `hit` is None without a used donor; an exact prefix is in `decision.plan`."""
        return cls(decision.plan.match, decision.statuses)
