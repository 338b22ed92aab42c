"""State of one blend: its start (`BlendDraft`) and its progress (`BlendState`).

A draft is made in a thread, without a forward of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.offsets import CorrectionBatch, OffsetCorrection, corrected, corrections
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.slices import contiguous
from dejakv.blend.token_map import long_runs
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.engines.vllm.blend.rows import ExtraRows, PromptRows
from dejakv.engines.vllm.device import DeviceCopies
from dejakv.engines.vllm.messages import BlendedRows
from dejakv.engines.vllm.pages import LentBuffer, slots_of
from dejakv.store.base import Rows, StoredState

StateReader = Callable[[str, "Rows | None"], "Sequence[StoredState] | str"]
"""Reads parts of a stored state by its id, with at least these rows (None: all), in order.

Returns the reason if there are none of this model."""


@dataclass(frozen=True)
class BlendDraft:
    """What is known of a blend before the model runs.

    Attributes
    ----------
    ids : Tensor, shape [n]
        Token ids of the whole prompt, in host memory, as the plan is.
    state : Tensor, shape [2, layers, kv_heads, n, head_dim]
        The donors' state in target order, with keys moved; undefined before `plan.first`.
    plan : RecomputePlan
        Rows to compute. vLLM holds the rows before `plan.first` and computes those from `plan.stop`
        on.
    tail : int
        Rows at the end that are the question, vLLM's among them.
    donors : tuple[str, ...]
        Ids of the donors that the map was made of, the best first.
    used_donors : tuple[str, ...]
        Ids of the donors that state was taken from.
    blend_depth : int
        Depth of rows that attend to them, see `StateInfo`.
    fresh : NDArray[bool], shape [n], or None
        Tokens that no donor holds in a run that could be found there (`mark_new_text`).
    mark : str
        Digest of donors, map and rows: ranks that have the same mark compute the same.
    left_out : tuple[str, ...]
        Why planned donors are not used.
    proof : Sequence[StoredState]
        All parts of a donor to check the model with; empty if none is longer than what was checked.
    buffer : LentBuffer or None
        Memory of `state`, to be given back after use.
    ready : torch.cuda.Event or None
        On a GPU: the event after which `state` is complete.
    """

    ids: torch.Tensor
    state: torch.Tensor
    plan: RecomputePlan
    tail: int
    donors: tuple[str, ...] = ()
    used_donors: tuple[str, ...] = ()
    blend_depth: int = 1
    fresh: NDArray[np.bool_] | None = None
    mark: str = ""
    left_out: tuple[str, ...] = ()
    proof: Sequence[StoredState] = ()
    buffer: LentBuffer | None = None
    ready: torch.cuda.Event | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens whose state goes into blocks."""
        return self.plan.end - self.plan.first

    @property
    def question_rows(self) -> int:
        """Maximum rows computed for the question, to choose the others."""
        return self.tail if self.plan.needs_question_pass else 0


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class BlendState:
    """One blend, from its draft to its last row.

    Attributes
    ----------
    checked : bool
        The model was checked with its donors as far as is needed.
    begun : bool
        The donors' state is in the blocks.
    rows : Tensor
        Rows still to be computed once the blend has begun, ascending.
    computed : int
        Number of computed rows.
    problem : str
        Why the blend is given up; empty if it is not.
    """

    draft: BlendDraft
    block_ids: tuple[int, ...]
    checked: bool = False
    begun: bool = False
    rows: torch.Tensor = _NONE
    computed: int = 0
    problem: str = ""
    _all_rows: torch.Tensor = _NONE

    @property
    def over(self) -> bool:
        """Whether nothing is left to compute."""
        return bool(self.problem) or (self.begun and not len(self.rows))

    @property
    def remaining_rows(self) -> int:
        """Rows of steps that the blend still takes, without the check."""
        draft = self.draft
        return (
            len(self.rows)
            if self.begun
            else draft.question_rows + draft.tokens // TOKENS_A_ROW + draft.plan.minimum_count
        )

    def begin(self, plan: RecomputePlan, rows: torch.Tensor) -> None:
        """Note the rows to compute, by the plan with the question's attention."""
        self.draft = replace(self.draft, plan=plan)
        self.begun, self.rows, self._all_rows = True, rows, rows

    def next(self, room: int, max_runs: int | None, block_tokens: int) -> "BlendPart":
        """Take the next rows to compute.

        Rows that offsets compare stay together if possible.

        Parameters
        ----------
        room : int
            Maximum rows.
        max_runs : int or None
            Maximum contiguous runs; None for any number.
        block_tokens : int
            Tokens of a KV block.
        """
        count = min(room, len(self.rows))
        if max_runs is not None:
            runs = contiguous(self.rows[:count].numpy())
            count = runs[min(max_runs, len(runs)) - 1][1]

        if count < len(self.rows):
            count = self._between_pieces(count)

        rows, self.rows = self.rows[:count], self.rows[count:]
        self.computed += count
        return self._part(rows, block_tokens)

    @property
    def blended_rows(self) -> BlendedRows | None:
        """New text for later blends, with the rows computed by vLLM itself; None without any."""
        draft = self.draft
        if draft.fresh is None:
            return None

        computed = np.zeros(len(draft.ids), dtype=bool)
        computed[self._all_rows.numpy()] = True
        # The rows behind the blend are computed by vLLM.
        computed[draft.plan.end :] = True

        runs = long_runs(computed & draft.fresh, SHORTEST_FINDABLE_RUN)
        return BlendedRows(runs, draft.used_donors, draft.blend_depth) if runs else None

    def _part(self, rows: torch.Tensor, block_tokens: int) -> "BlendPart":
        prompt_rows = PromptRows(self.draft.ids[rows], rows, self.block_ids)
        if self.draft.plan.runs is None:
            return BlendPart(self.draft, prompt_rows)

        # A copy, since the next part needs the plan's runs as they are.
        runs = self.draft.plan.runs[: self.draft.plan.end].copy()
        excluded_rows = np.setdiff1d(self._all_rows.numpy(), rows.numpy(), assume_unique=True)
        # Rows that another part computes are not corrected.
        runs[excluded_rows] = -1

        copies = DeviceCopies.of(self.draft.state.device)
        moves = corrections(runs, rows, self.draft.plan.changed)
        if not moves:
            return BlendPart(self.draft, prompt_rows)

        # On a GPU launches cost more than padding, and on a CPU it is the other way round.
        batch = None if copies.is_host else CorrectionBatch.of(moves)
        rest = batch.rest if batch is not None else torch.cat([move.rest for move in moves])
        # The same slots in every layer, so they are made once.
        slots = copies.upload(slots_of(self.block_ids, block_tokens, rest))
        if batch is not None:
            return BlendPart(self.draft, prompt_rows, (), slots, batch.mapped(copies.upload))
        uploaded = tuple(
            OffsetCorrection(
                *(
                    copies.upload(part)
                    for part in (move.rest, move.anchors, move.anchor_places, move.weights)
                )
            )
            for move in moves
        )
        return BlendPart(self.draft, prompt_rows, uploaded, slots)

    def _between_pieces(self, count: int) -> int:
        pieces = self.draft.plan.runs
        if pieces is None:
            return count
        # One row more shows whether a piece ends exactly here.
        of_rows = pieces[self.rows[: count + 1].numpy()]

        cuts = np.flatnonzero(np.diff(of_rows)) + 1
        return int(cuts[-1]) if cuts.size else count


@dataclass(frozen=True)
class BlendPart:
    """Rows of a blend for one forward.

    Attributes
    ----------
    moves : tuple[OffsetCorrection, ...]
        Corrections by these rows for the rows between them (`blend.offsets`).
    slots : Tensor or None
        Slots of the corrected rows.
    batch : CorrectionBatch or None
        The corrections on a GPU, in place of `moves`.
    """

    draft: BlendDraft
    rows: PromptRows
    moves: tuple[OffsetCorrection, ...] = ()
    slots: torch.Tensor | None = None
    batch: CorrectionBatch | None = None
    # The same in all layers, so they are made in the first one that needs them.
    _index: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def corrected_rows(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor
    ) -> ExtraRows | None:
        """Correct the rows between the computed ones, in one layer; None without any.

        `key` and `value` are those of a forward, `[tokens, kv_heads, head_dim]`, and the computed
        rows are its tokens `rows`.
        """
        # The first layer's K and V depend on the token alone.
        if not layer or self.slots is None:
            return None

        donor_state = self.draft.state[:, layer]
        if self.batch is not None:
            anchors, both = self._indexes(rows)
            shifted = self.batch.corrected(
                torch.stack((key, value)).index_select(1, anchors),
                donor_state.transpose(1, 2).index_select(1, both),
            ).transpose(1, 2)
        else:
            computed_state = torch.stack((key[rows].transpose(0, 1), value[rows].transpose(0, 1)))
            shifted = torch.cat(
                [corrected(donor_state, computed_state, part) for part in self.moves], dim=2
            )
        return shifted[0], shifted[1], self.slots

    def _indexes(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the anchors' tokens in the forward, and the rows of anchors and of the others."""
        batch = self.batch
        assert batch is not None
        if not self._index:
            self._index.append(rows[batch.anchor_places])
            self._index.append(torch.cat((batch.anchors, batch.rest)))
        return self._index[0], self._index[1]
