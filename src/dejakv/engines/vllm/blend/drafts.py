"""What a blend starts from: the donors' state in the prompt's order, keys moved, and which rows must be computed.

Made in a thread (`Blender.draft`), without a forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.recomputed import RecomputePlan
from dejakv.engines.vllm.pages import Lent
from dejakv.store.base import Chunk, Rows

Read = Callable[[str, "Rows | None"], "Sequence[Chunk] | str"]
"""What holds at least these rows of a stored state of this model, by its id, first rows first (None: all); or why there is none."""


@dataclass(frozen=True)
class Draft:
    """What is known before the model runs.

    ids       target tokens `[n]`
    state     the donors', in target order and keys moved: `[2, layers, kv_heads, n, head_dim]`; undefined before `plan.first`
    plan      which rows are computed; `plan.first` rows are held by vLLM, and from `plan.stop` on it computes by itself
    tail      rows at the end that are the question, vLLM's among them
    donors    ids of the donors that the map was made of, the best first
    used      those that state was taken from
    generation of rows that attend to them, see `ChunkMeta`
    fresh     `[n]` bool: what no donor holds in a run that could be found there (`new_text`)
    mark      names donors, map and rows: ranks that have the same mark compute the same
    left_out  why donors that were planned are not in it
    proof     all parts of a donor to check the model with; empty if none is longer than what was checked
    lent      the memory of `state`, to be given back after use
    ready     on a GPU: when `state` is complete there (not run on one yet)
    """

    ids: torch.Tensor
    state: torch.Tensor
    plan: RecomputePlan
    tail: int
    donors: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    generation: int = 1
    fresh: NDArray[np.bool_] | None = None
    mark: str = ""
    left_out: tuple[str, ...] = ()
    proof: Sequence[Chunk] = ()
    lent: Lent | None = None
    ready: torch.cuda.Event | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens whose state goes into blocks."""
        return self.plan.end - self.plan.first

    @property
    def asks(self) -> int:
        """Maximum rows computed for the question, to choose the others."""
        return self.tail if self.plan.asks else 0

    def wait(self) -> None:
        """In the engine loop, before `state` is used: its kernels run after those of the thread that made the draft, and its
        memory is not given to others before they ran."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.state.device)
            stream.wait_event(self.ready)
            self.state.record_stream(stream)
