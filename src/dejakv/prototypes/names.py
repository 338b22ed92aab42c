"""The prototypes' names for values that have other names here, for code written for them.

docs/prototypes/index.md lists every name of the prototypes, and what replaces those without an
alias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from dejakv.decide.levels.base import Match, Status
from dejakv.decide.plan import Decision
from dejakv.encoder_cache import QueueingController as QueueingController
from dejakv.encoder_cache import VisualCacheResult as VisualCacheResult
from dejakv.errors import former_fields
from dejakv.store.base import StoredState

SemanticTextMatch = EmbeddingMatch = CacheHit = Match
"""The result of a level's `search`: `.chunk_id`, `.score` and, of latent layers, `.layer`."""


@former_fields(chunk="stored_state")
@dataclass(frozen=True)
class KVChunk:
    """A stored state as the prototype showed it: K and V of a prompt, without block numbers."""

    stored_state: StoredState

    @property
    def chunk_id(self) -> str:
        """Id of the state in the store."""
        return self.stored_state.meta.id

    @property
    def num_tokens(self) -> int:
        """Tokens of the state."""
        return self.stored_state.meta.num_tokens

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors `layer_0`, `layer_1`, ...: `[2 (K, V), kv_heads, tokens, head_dim]`."""
        data = self.stored_state.tensor.data
        return {f"layer_{index}": data[:, index] for index in range(data.shape[1])}


@dataclass(frozen=True)
class ReuseReport:
    """A decision of `HierarchicalCache.find` as the prototype's `try_reuse` returned it."""

    hit: Match | None
    statuses: Mapping[str, Status]

    @classmethod
    def of(cls, decision: Decision) -> "ReuseReport":
        """Convert a decision. `hit` is None without a used donor.

        An exact prefix is in `decision.plan`.
        """
        return cls(decision.plan.match, decision.statuses)
