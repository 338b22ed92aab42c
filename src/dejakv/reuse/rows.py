"""Which rows of a layer are computed: one rule for every engine that blends. Nothing here knows a model."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejakv.reuse.schedule import Schedule
from dejakv.reuse.selector import Selector, choose
from dejakv.reuse.surroundings import Surroundings
from dejakv.reuse.token_map import Ids


@dataclass(frozen=True)
class RowPlan:
    """Which rows of a prompt are computed.

    schedule    share of the prompt's rows, a layer
    selector    what ranks rows
    similarity  `[tokens]` of the token map, in [0, 1]
    forced      `[tokens]` bool: computed in every layer, whatever the share
    threshold   by need: rows whose score is above it are computed even beyond the share; None for the share alone
    scores      `[tokens]` scores made elsewhere (selector `query`)
    left        `[tokens]` bool: rows not worth choosing, since the budget does not pay for the rest of their sentence
    exact       rows from the beginning whose state is exact; a layer's share is of the others
    first       rows before it are there already, and are computed in no layer
    runs        `[tokens]`: whose rows that are not computed move by what the computed ones show (`offsets.runs_of`); None: none
    around      what the question's attention is weighed by, and how far offsets go; None: all rows alike
    stop        rows from it on are computed by somebody else, in every layer; None: there are none
    """

    schedule: Schedule
    selector: Selector
    similarity: Tensor
    forced: Tensor
    threshold: float | None = None
    scores: Tensor | None = None
    left: Tensor | None = None
    first: int = 0
    stop: int | None = None
    exact: int = 0
    runs: Ids | None = None
    around: Surroundings | None = None

    @property
    def end(self) -> int:
        return len(self.forced) if self.stop is None else self.stop

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many of the rows from `first` to `stop` the schedule gives each layer.

        It pays for the rows that are not exact; forced ones from `stop` on are taken off.
        """
        n, there = len(self.forced), max(self.first, self.exact)
        theirs = int(self.forced[self.end :].sum())
        layers = range(len(self.schedule.shares))
        return tuple(max(0, min(self.schedule.rows(i, n, there), n - self.first) - theirs) for i in layers)

    @property
    def ranks(self) -> bool:
        """Whether scores matter: a layer that does not compute all rows computes more than the forced ones, and not all others that
        may be chosen."""
        rows, forced = self.end - self.first, self.forced[self.first : self.end]
        free = ~forced if self.left is None else ~(forced | self.left[self.first : self.end])
        most = max((count for count in self.counts if count < rows), default=0)
        return 0 < most - int(forced.sum()) < int(free.sum())

    def known_scores(self, layer: int) -> Tensor | None:
        """Scores `[tokens]` that need nothing of the layer; None where the selector compares its K or V. The first layer's
        depend on the token alone: there the map decides."""
        if self.scores is not None:
            return self.scores if self._worth is None else self.scores * self._worth
        if self.selector.deviation and layer > 0:
            return None
        return self.selector.fixed_scores(self.similarity)

    @cached_property
    def _worth(self) -> Tensor | None:
        return None if self.around is None else torch.from_numpy(self.around.worth).to(self.forced.device)

    @property
    def changed(self) -> NDArray[np.float32] | None:
        """Which share of its offset each row moves by; None: all by the whole of it."""
        return None if self.around is None else self.around.changed

    def kept(self, layer: int, rows: Tensor, scores: Tensor) -> Tensor:
        """Which of the rows that the layer before computed the layer computes: ascending indices into `rows`.

        rows, scores  `[k]`, of a layer whose count is below k
        """
        forced, wanted = self.forced[rows], self.counts[layer]
        if self.threshold is not None:
            forced = forced | (scores > self.threshold)
        if self.left is not None:
            left = self.left[rows]
            scores = scores.masked_fill(left, -1.0)
            wanted = min(wanted, int((~left).sum()))
        return choose(scores, forced, wanted)

    def fixed(self) -> Tensor:
        """The rows that all layers compute, ascending, of a plan whose selector compares nothing of a layer and whose schedule is
        constant."""
        rows = torch.arange(self.first, self.end, device=self.forced.device)
        scores = self.known_scores(0)
        if self.counts[0] >= len(rows) or scores is None:
            return rows
        return rows[self.kept(0, rows, scores[rows])]

    def of_question(self, tail: int) -> "RowPlan":
        """The plan of a pass of the prompt's last `tail` rows alone over the donors' state, from which `query` makes its scores.
        Layers that are computed completely are so here too: of the donors' state nothing is taken there."""
        alone = torch.zeros_like(self.forced)
        alone[len(alone) - tail :] = True
        partial = Schedule(tuple(0.0 if share < 1.0 else 1.0 for share in self.schedule.shares))
        return RowPlan(partial, Selector("similarity"), self.similarity, alone, first=self.first)
