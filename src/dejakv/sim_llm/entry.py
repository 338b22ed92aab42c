"""A cached task: its embedding and the KV that a similar task takes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TaskCacheEntry:
    """One task as `InterTaskKVManager` hands it out.

    task_embedding  [dim] float32 of length 1
    lsh_hash        the embedding's bucket, characters 0 and 1
    top_layer_kv    keys and values, each [layers, kv heads, tokens, head dim], keys rotated for positions 0..tokens-1. In a
                    model without ordinary layers on top, `layers` is 1
    timestamp       seconds since 1970 at which it was added
    token_ids       the task's prompt; empty if it was added without
    similarity      cosine with the query that found it; 1.0 from `add_task`
    """

    task_id: str
    task_embedding: NDArray[np.float32] = field(repr=False)
    lsh_hash: str
    top_layer_kv: "tuple[Tensor, Tensor]" = field(repr=False)
    timestamp: float
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    similarity: float = 1.0

    @property
    def tokens(self) -> int:
        return self.top_layer_kv[0].shape[-2]
