"""A blend in the blocks of its request: which rows are still to be computed, and what else changes when they are."""

from dataclasses import dataclass

import numpy as np
import torch

from dejakv.blend.offsets import Correction, corrected, corrections
from dejakv.blend.slices import contiguous
from dejakv.blend.token_map import long_runs
from dejakv.decide.copied.fingerprints import GUARANTEED
from dejakv.engines.vllm.blend.drafts import Draft
from dejakv.engines.vllm.blend.rows import More, PromptRows
from dejakv.engines.vllm.messages import Kept
from dejakv.engines.vllm.pages import slots_of


@dataclass
class Mixing:
    """One blend, from the moment its donors' state is in the blocks.

    rows      still to be computed, ascending
    computed  how many of them are computed
    """

    draft: Draft
    block_ids: tuple[int, ...]
    block_tokens: int
    rows: torch.Tensor
    computed: int = 0

    def __post_init__(self) -> None:
        self._every = self.rows

    def next(self, room: int, most_runs: int | None) -> "BlendPart":
        """Take the next rows: at most `room`, in at most `most_runs` contiguous runs. Rows that offsets compare stay together if
        possible."""
        count = min(room, len(self.rows))
        if most_runs is not None:
            runs = contiguous(self.rows[:count].cpu().numpy())
            count = runs[min(most_runs, len(runs)) - 1][1]
        if count < len(self.rows):
            count = self._between_pieces(count)
        rows, self.rows = self.rows[:count], self.rows[count:]
        self.computed += count
        return self._part(rows)

    @property
    def kept(self) -> Kept | None:
        """New text for later blends, with the rows computed by vLLM itself; None without any."""
        draft = self.draft
        if draft.fresh is None:
            return None
        computed = np.zeros(len(draft.ids), dtype=bool)
        computed[self._every.cpu().numpy()] = True
        computed[draft.plan.end :] = True
        runs = long_runs(computed & draft.fresh, GUARANTEED)
        return Kept(runs, draft.used, draft.generation) if runs else None

    def _part(self, rows: torch.Tensor) -> "BlendPart":
        taken = PromptRows(self.draft.ids[rows], rows, self.block_ids)
        if self.draft.plan.runs is None:
            return BlendPart(self.draft, taken)
        runs = self.draft.plan.runs[: self.draft.plan.end].copy()
        others = np.setdiff1d(self._every.cpu().numpy(), rows.cpu().numpy(), assume_unique=True)
        runs[others] = -1  # rows of other parts do not move
        moves = tuple(corrections(runs, rows, self.draft.plan.changed))
        if not moves:
            return BlendPart(self.draft, taken)
        slots = slots_of(self.block_ids, self.block_tokens, torch.cat([move.rest for move in moves]))
        return BlendPart(self.draft, taken, moves, slots.to(rows.device))

    def _between_pieces(self, count: int) -> int:
        pieces = self.draft.plan.runs
        if pieces is None:
            return count
        of_rows = pieces[self.rows[: count + 1].cpu().numpy()]
        cuts = np.flatnonzero(np.diff(of_rows)) + 1
        return int(cuts[-1]) if cuts.size else count


@dataclass(frozen=True)
class BlendPart:
    """Rows of a blend for one forward.

    moves  corrections by these rows for the rows between them (`blend.offsets`)
    slots  of the corrected rows
    """

    draft: Draft
    rows: PromptRows
    moves: tuple[Correction, ...] = ()
    slots: torch.Tensor | None = None

    def moved(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> More | None:
        """The corrected rows; None without any. `keys`, `values`: the computed ones' `[kv_heads, rows, head_dim]`."""
        if not layer or self.slots is None:  # the first layer's K and V depend on the token alone
            return None
        held, fresh = self.draft.state[:, layer], torch.stack((keys, values))
        shifted = torch.cat([corrected(held, fresh, part) for part in self.moves], dim=2)
        return shifted[0], shifted[1], self.slots
