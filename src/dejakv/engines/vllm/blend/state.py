"""State of one blend: its start (`BlendDraft`) and its progress (`BlendState`).

A draft is made in a thread, without a forward of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.offsets import OffsetCorrection, corrected, corrections
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.token_map import long_runs
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN
from dejakv.engines.vllm.blend.correction_table import CorrectionTable
from dejakv.engines.vllm.blend.fused import FusedCopy
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.engines.vllm.blend.rows import ExtraRows, PromptRows
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
    unpinned : bool
        Some of it went to a GPU from memory that is not pinned.
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
    unpinned: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens whose state goes into blocks."""
        return self.plan.end - self.plan.first

    @property
    def question_rows(self) -> int:
        """Maximum rows computed for the question, to choose the others."""
        return self.tail if self.plan.needs_question_pass else 0


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class FreshRows:
    """Computed rows of a piece that a forward could not take whole.

    Attributes
    ----------
    rows : Tensor, shape [k]
        Rows of the prompt, in host memory.
    among : Tensor, shape [k]
        Where they are among all rows that a part takes, on the device.
    layers : dict[int, Tensor]
        K and V by layer, `[2, k, kv_heads, head_dim]`.
    """

    rows: torch.Tensor
    among: torch.Tensor
    layers: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


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
    _cut: FreshRows | None = None

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

    def next(self, room: int, max_runs: int | None, gap: int, fused: FusedCopy) -> "BlendPart":
        """Take the next rows to compute.

        Rows that offsets compare stay together if possible.

        Parameters
        ----------
        room : int
            Maximum tokens of a forward.
        max_runs : int or None
            Maximum sequences; None for any number.
        gap : int
            Rows between two runs up to which they are one sequence.
        fused : FusedCopy
            Corrects rows of the blocks.
        """
        tokens, sequences = PromptRows(self.rows, self.rows, self.block_ids).cost(gap)
        count = int(np.searchsorted(tokens, room, "right"))
        if max_runs is not None:
            count = min(count, int(np.searchsorted(sequences, max_runs, "right")))

        if count < len(self.rows):
            count = self._between_pieces(count)

        rows, self.rows = self.rows[:count], self.rows[count:]
        self.computed += count
        return self._part(rows, fused)

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

    def _part(self, rows: torch.Tensor, fused: FusedCopy) -> "BlendPart":
        prompt_rows = PromptRows(self.draft.ids[rows], rows, self.block_ids)
        pieces = self.draft.plan.runs
        if pieces is None:
            return BlendPart(self.draft, prompt_rows)

        earlier, anchors = self._cut, rows
        if earlier is not None:
            anchors = torch.cat([earlier.rows, rows])
        self._cut = None
        # What these rows show is needed once more where a piece goes on behind them.
        last, following = (
            [piece for piece in pieces[part.numpy()].tolist() if piece >= 0]
            for part in (anchors, self.rows)
        )
        if last and following and last[-1] == following[0]:
            among = torch.from_numpy(np.flatnonzero(pieces[anchors.numpy()] == last[-1]))
            self._cut = FreshRows(anchors[among], fused.upload(among))

        # A copy, since the next part needs the plan's pieces as they are.
        runs = pieces[: self.draft.plan.end].copy()
        # Rows that another part computes are not corrected.
        runs[np.setdiff1d(self._all_rows.numpy(), anchors.numpy(), assume_unique=True)] = -1
        moves = corrections(runs, anchors, self.draft.plan.changed)
        if not moves:
            return BlendPart(self.draft, prompt_rows, earlier=earlier, later=self._cut)

        rest = torch.cat([move.rest for move in moves])
        # The same slots in every layer, so they are made once.
        slots = slots_of(self.block_ids, fused.block_tokens, rest)
        table = fused.correction_table(moves, slots)
        if table is not None:
            return BlendPart(self.draft, prompt_rows, (), None, fused, table, earlier, self._cut)
        uploaded = tuple(
            OffsetCorrection(
                *(
                    fused.upload(part)
                    for part in (move.rest, move.anchors, move.anchor_places, move.weights)
                )
            )
            for move in moves
        )
        slots = fused.upload(slots)
        return BlendPart(self.draft, prompt_rows, uploaded, slots, earlier=earlier, later=self._cut)

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
        Corrections by these rows, and by `earlier` ones, for the rows between them
        (`blend.offsets`).
    slots : Tensor or None
        Slots of the corrected rows.
    fused, table : FusedCopy and CorrectionTable, or None
        In place of `moves`: what applies the corrections on a GPU, and these.
    earlier : FreshRows or None
        Rows of the first piece that an earlier part computed.
    later : FreshRows or None
        Where to keep the rows of the last piece, which the next part needs.
    """

    draft: BlendDraft
    rows: PromptRows
    moves: tuple[OffsetCorrection, ...] = ()
    slots: torch.Tensor | None = None
    fused: FusedCopy | None = None
    table: CorrectionTable | None = None
    earlier: FreshRows | None = None
    later: FreshRows | None = None

    def corrected_rows(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor
    ) -> ExtraRows | None:
        """Correct the rows between the computed ones, in one layer.

        `key` and `value` are those of a forward, `[tokens, kv_heads, head_dim]`, and the computed
        rows are its tokens `rows`. Returns what is to be written; None without any, or if it was.
        """
        # The first layer's K and V depend on the token alone.
        if not layer:
            return None
        if self.earlier is not None or self.later is not None:
            key, value, rows = self._with_other_parts(layer, key, value, rows)
        if self.fused is not None:
            assert self.table is not None
            self.fused.correct(layer, key, value, rows, self.draft.state, self.table)
            return None
        if self.slots is None:
            return None

        computed_state = torch.stack((key[rows].transpose(0, 1), value[rows].transpose(0, 1)))
        donor_state = self.draft.state[:, layer]
        shifted = torch.cat(
            [corrected(donor_state, computed_state, part) for part in self.moves], dim=2
        )
        return shifted[0], shifted[1], self.slots

    def _with_other_parts(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put the rows of an earlier part before these, and keep those of the next part."""
        fresh = torch.stack((key.index_select(0, rows), value.index_select(0, rows)))
        if self.earlier is not None:
            fresh = torch.cat((self.earlier.layers.pop(layer), fresh), dim=1)
        if self.later is not None:
            self.later.layers[layer] = fresh.index_select(1, self.later.among)
        return fresh[0], fresh[1], torch.arange(fresh.shape[1], device=fresh.device)
