"""One blend's state: its start (`BlendDraft`), made in a thread without a forward pass, and its progress (`BlendState`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.offsets import OffsetCorrection, corrected, corrections
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.slices import contiguous
from dejakv.blend.token_map import long_runs
from dejakv.decide.copied.fingerprints import GUARANTEED
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.engines.vllm.blend.rows import More, PromptRows
from dejakv.engines.vllm.messages import BlendedRows
from dejakv.engines.vllm.pages import LentBuffer, slots_of
from dejakv.store.base import Rows, StoredState

Read = Callable[[str, "Rows | None"], "Sequence[StoredState] | str"]
"""What holds at least these rows of a stored state of this model, by its id, first rows first (None: all); or why there is none."""


@dataclass(frozen=True)
class BlendDraft:
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
    proof: Sequence[StoredState] = ()
    lent: LentBuffer | None = None
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


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class BlendState:
    """One blend, from its draft to its last row.

    checked   the model was checked with its donors as far as is needed
    begun     the donors' state is in the blocks
    rows      then: still to be computed, ascending
    computed  how many of them are computed
    problem   why it is given up, empty if it is not
    """

    draft: BlendDraft
    block_ids: tuple[int, ...]
    checked: bool = False
    begun: bool = False
    rows: torch.Tensor = _NONE
    computed: int = 0
    problem: str = ""
    _every: torch.Tensor = _NONE

    @property
    def over(self) -> bool:
        """Whether nothing is left to compute."""
        return bool(self.problem) or (self.begun and not len(self.rows))

    @property
    def left(self) -> int:
        """Rows of steps that it still takes, without the check."""
        draft = self.draft
        return len(self.rows) if self.begun else draft.asks + draft.tokens // TOKENS_A_ROW + draft.plan.least

    def begin(self, plan: RecomputePlan, rows: torch.Tensor) -> None:
        """Note the rows to compute, by the plan with the question's attention."""
        self.draft = replace(self.draft, plan=plan)
        self.begun, self.rows, self._every = True, rows, rows

    def next(self, room: int, max_runs: int | None, block_tokens: int) -> "BlendPart":
        """Take the next rows: at most `room`, in at most `max_runs` contiguous runs. Rows that offsets compare stay together if
        possible."""
        count = min(room, len(self.rows))
        if max_runs is not None:
            runs = contiguous(self.rows[:count].cpu().numpy())
            count = runs[min(max_runs, len(runs)) - 1][1]
        if count < len(self.rows):
            count = self._between_pieces(count)

        rows, self.rows = self.rows[:count], self.rows[count:]
        self.computed += count
        return self._part(rows, block_tokens)

    @property
    def kept(self) -> BlendedRows | None:
        """New text for later blends, with the rows computed by vLLM itself; None without any."""
        draft = self.draft
        if draft.fresh is None:
            return None
        computed = np.zeros(len(draft.ids), dtype=bool)
        computed[self._every.cpu().numpy()] = True
        # The rows behind the blend are computed by vLLM.
        computed[draft.plan.end :] = True
        runs = long_runs(computed & draft.fresh, GUARANTEED)
        return BlendedRows(runs, draft.used, draft.generation) if runs else None

    def _part(self, rows: torch.Tensor, block_tokens: int) -> "BlendPart":
        prompt_rows = PromptRows(self.draft.ids[rows], rows, self.block_ids)
        if self.draft.plan.runs is None:
            return BlendPart(self.draft, prompt_rows)
        # A copy, since the next part needs the plan's runs as they are.
        runs = self.draft.plan.runs[: self.draft.plan.end].copy()
        excluded_rows = np.setdiff1d(self._every.cpu().numpy(), rows.cpu().numpy(), assume_unique=True)
        runs[excluded_rows] = -1  # rows of other parts do not move

        moves = tuple(corrections(runs, rows, self.draft.plan.changed))
        if not moves:
            return BlendPart(self.draft, prompt_rows)
        # The same slots in every layer, so they are made once.
        slots = slots_of(self.block_ids, block_tokens, torch.cat([move.rest for move in moves]))
        return BlendPart(self.draft, prompt_rows, moves, slots.to(rows.device))

    def _between_pieces(self, count: int) -> int:
        pieces = self.draft.plan.runs
        if pieces is None:
            return count
        # One row more shows whether a piece ends exactly here.
        of_rows = pieces[self.rows[: count + 1].cpu().numpy()]
        cuts = np.flatnonzero(np.diff(of_rows)) + 1
        return int(cuts[-1]) if cuts.size else count


@dataclass(frozen=True)
class BlendPart:
    """Rows of a blend for one forward.

    moves  corrections by these rows for the rows between them (`blend.offsets`)
    slots  of the corrected rows
    """

    draft: BlendDraft
    rows: PromptRows
    moves: tuple[OffsetCorrection, ...] = ()
    slots: torch.Tensor | None = None

    def moved(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> More | None:
        """The corrected rows; None without any. `keys`, `values`: the computed ones' `[kv_heads, rows, head_dim]`."""
        if not layer or self.slots is None:  # the first layer's K and V depend on the token alone
            return None
        donor_state, computed_state = self.draft.state[:, layer], torch.stack((keys, values))
        shifted = torch.cat([corrected(donor_state, computed_state, part) for part in self.moves], dim=2)
        return shifted[0], shifted[1], self.slots
