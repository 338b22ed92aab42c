"""The recomputed tokens of a blend: how many, and which. One set for all layers, known before the model runs; no model is named here.

The forced tokens (`forced.need`) are always among them. The others are chosen by score: the question's attention (ProphetKV; SnapKV,
arXiv 2404.14469) or the token map's similarity. Another choice is a function of the scores: see `Choose`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejakv.blend.forced import ForcedTokens
from dejakv.blend.offsets import runs_of
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs

NEAR = 30.0
"""Tokens over which the effect of a small change fades."""
LEAST = 0.1
"""Weight of a token far behind such a change, relative to one right behind it."""

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""`choose(scores, forced, count)`: indices, ascending, of `count` tokens to recompute. `scores` (float, -1 for a token not to be chosen) and
`forced` (bool) are `[tokens]`; forced tokens are among the chosen, even beyond `count`."""


def highest(scores: Tensor, forced: Tensor, count: int) -> Tensor:
    """Choose all forced tokens and the highest scores up to `count` tokens, of equal scores the first.

    >>> highest(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([True, False, False]), 2).tolist()
    [0, 1]
    """
    target_count = max(count, int(forced.sum()))
    if target_count >= scores.numel():
        return torch.arange(scores.numel(), device=scores.device)
    ranked = scores.float().masked_fill(forced, float("inf"))
    return ranked.sort(descending=True, stable=True).indices[:target_count].sort().values


def count_of(share: float, tokens: int, exact: int = 0) -> int:
    """Return how many of a prompt's tokens a share pays for: a share of those behind the exact prefix, and at least the last one.

    >>> count_of(0.2, 100, exact=50), count_of(0.0, 100), count_of(1.0, 100, exact=50)
    (10, 1, 100)
    """
    return tokens if share >= 1.0 else max(1, round(share * (tokens - exact)))


@dataclass(frozen=True)
class TextSurroundings:
    """The text before each token, compared with the text before its donor token.

    Behind an edit a prompt's tokens keep nearly all their context: their state is off near the edit and hardly elsewhere, each token by an
    error of its own. A moved passage has other text before it: all its tokens are off, and neighbours alike. So `worth` prefers tokens near
    the change where little changed, and offsets, which carry on the error of neighbours, count by `changed`.

    changed  `[tokens]` in [0, 1]: share of the tokens before a token's copied run, here or in its donor's prompt (the longer counts), that
             the other does not have; 1 for a token that differs from its donor token
    behind   `[tokens]`: tokens since the copied run began
    """

    changed: NDArray[np.float32]
    behind: Ids

    @property
    def worth(self) -> NDArray[np.float32]:
        """Weights of the question's attention, `[tokens]` in (0, 1]."""
        near = np.maximum(LEAST, np.exp(-self.behind / NEAR))
        return (self.changed + (1.0 - self.changed) * near).astype(np.float32)


def surroundings_of(target: Ids, donors: DonorTokens, donor_map: TokenMap) -> TextSurroundings:
    """Compare the text before all tokens. The text before a donor that begins late in its prompt is unknown and counts as other text.

    >>> donor_map = TokenMap(np.array([0, 1, 2, 3]), np.ones(4, np.float32), np.zeros(4, np.int64))
    >>> surroundings_of(np.array([5, 1, 6, 7]), DonorTokens.of([5, 2, 6, 7]), donor_map).changed.tolist()
    [0.0, 1.0, 0.5, 0.5]
    """
    first, stop = equal_runs(target, donors, donor_map.source)
    index = np.arange(len(target))
    equal = donors.ids[donor_map.source] == target
    number, places = donors.number[donor_map.source], donors.positions[donor_map.source]
    changed = np.ones(len(target), dtype=np.float32)

    for donor in np.unique(number[equal]).tolist():
        # Place of each target token in the donor's prompt: the same position, or the one that the map found.
        donor_places = np.where(equal & (number == donor), places, len(target) + len(donors))
        same_place = _in_place(target, donors, donor)
        donor_places[same_place] = np.minimum(donor_places[same_place], index[same_place])
        for start in np.unique(first[equal & (number == donor)]).tolist():
            place = int(places[start])
            shared_before = np.count_nonzero(donor_places[:start] < place)
            # Nothing comes before it in both prompts: nothing has changed there.
            changed[start : stop[start]] = 1.0 - shared_before / max(start, place) if max(start, place) else 0.0
    return TextSurroundings(changed, index - first)


def _in_place(target: Ids, donors: DonorTokens, donor: int) -> Ids:
    """Tokens of the target that stand at the same position in the donor's prompt."""
    begin = donors.starts[donor]
    position = donors.first[donor]
    length = max(0, min(donors.lengths[donor], len(target) - position))
    same = donors.ids[begin : begin + length] == target[position : position + length]
    return position + np.flatnonzero(same)


@dataclass(frozen=True)
class RecomputePlan:
    """Which tokens of a prompt are recomputed, and how the others move.

    share       share of the prompt's tokens
    similarity  `[tokens]` of the token map, in [0, 1]
    forced      `[tokens]` bool: recomputed whatever the share
    attention   `[tokens]`: the question's attention, which ranks tokens instead of similarity; None: similarity ranks
    left        `[tokens]` bool: not to be chosen (see `ForcedTokens`)
    exact       tokens of the exact prefix; the share is of the others
    first       tokens before it are there already, and are not recomputed
    stop        tokens from it on are computed by somebody else; None: there are none
    runs        `[tokens]`: copied runs along which offsets are carried (`offsets.runs_of`); None: no offsets
    around      weights of attention and of offsets; None: 1
    asks        the question's attention is still to be computed
    choose      the choice among tokens by their scores
    """

    share: float
    similarity: Tensor
    forced: Tensor
    attention: Tensor | None = None
    left: Tensor | None = None
    first: int = 0
    stop: int | None = None
    exact: int = 0
    runs: Ids | None = None
    around: TextSurroundings | None = None
    asks: bool = False
    choose: Choose = highest

    @classmethod
    def of(
        cls, config: BlendConfig, target: Ids, donors: DonorTokens, donor_map: TokenMap, needed: ForcedTokens, device: torch.device | str = "cpu",
        *, first: int = 0, stop: int | None = None, choose: Choose = highest,
    ) -> "RecomputePlan":  # fmt: skip
        """Make the plan of a prompt from its token map and forced tokens; the question's attention is added by the engine."""
        plan = cls(
            config.share,
            torch.from_numpy(donor_map.similarity).to(device),
            torch.from_numpy(needed.forced).to(device),
            left=torch.from_numpy(needed.left).to(device) if needed.left.any() else None,
            first=first,
            stop=stop,
            exact=needed.exact,
            runs=runs_of(target, donors, donor_map, needed.exact) if config.offsets else None,
            around=surroundings_of(target, donors, donor_map) if config.surroundings else None,
            choose=choose,
        )
        return replace(plan, asks=config.asks and plan._ranks)  # else the forced tokens are all that is recomputed

    def with_attention(self, attention: Tensor) -> "RecomputePlan":
        """The plan with the question's attention to each token, `[tokens]`."""
        return replace(self, attention=attention, asks=False)

    @property
    def end(self) -> int:
        return len(self.forced) if self.stop is None else self.stop

    @property
    def count(self) -> int:
        """How many of the tokens from `first` to `stop` the share pays for: forced tokens from `stop` on are taken off."""
        n = len(self.forced)
        paid = min(count_of(self.share, n, max(self.first, self.exact)), n - self.first)
        return max(0, paid - int(self.forced[self.end :].sum()))

    @property
    def least(self) -> int:
        """How many tokens from `first` to `stop` are recomputed, whatever ranks them."""
        return max(self.count, int(self.forced[self.first : self.end].sum()))

    @property
    def _ranks(self) -> bool:
        """Whether scores matter: more than the forced tokens are recomputed, and not all others that may be chosen."""
        count, forced = self.count, self.forced[self.first : self.end]
        free = ~forced if self.left is None else ~(forced | self.left[self.first : self.end])
        return count < self.end - self.first and 0 < count - int(forced.sum()) < int(free.sum())

    @property
    def changed(self) -> NDArray[np.float32] | None:
        """Share of its offset that each token moves by; None: the whole of it."""
        return None if self.around is None else self.around.changed

    @cached_property
    def tokens(self) -> Tensor:
        """The recomputed tokens from `first` to `stop`, ascending.

        >>> similarity, forced = torch.tensor([0.9, 0.2, 0.5, 1.0]), torch.tensor([False, False, False, True])
        >>> RecomputePlan(0.5, similarity, forced).tokens.tolist()
        [1, 3]
        """
        tokens = torch.arange(self.first, self.end, device=self.forced.device)
        target_count = self.count
        if target_count >= len(tokens):
            return tokens
        scores = self._scores[tokens]
        if self.left is not None:
            excluded = self.left[tokens]
            scores = scores.masked_fill(excluded, -1.0)
            # Or the choice would be filled up with tokens that must not be chosen.
            target_count = min(target_count, int((~excluded).sum()))
        return tokens[self.choose(scores, self.forced[tokens], target_count)]

    @property
    def _scores(self) -> Tensor:
        if self.attention is None:
            return 1.0 - self.similarity
        if self.around is None:
            return self.attention
        return self.attention * torch.from_numpy(self.around.worth).to(self.attention.device)

    def of_question(self, tail: int) -> "RecomputePlan":
        """The plan of a pass of the prompt's last `tail` tokens alone, for the question's attention."""
        question_mask = torch.zeros_like(self.forced)
        question_mask[len(question_mask) - tail :] = True
        return RecomputePlan(0.0, self.similarity, question_mask, first=self.first)
