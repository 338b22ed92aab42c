"""Recomputed tokens of a blend: how many, and which.

They are one set for all layers, known before the model runs, and no model is named here. The forced
tokens (`forced.mark_forced`) are always among them. The others are chosen by score: the question's
attention (selector `prophet`, after ProphetKV; SnapKV, arXiv 2404.14469) or the token map's
similarity. Another choice is a
function of the scores (see `Choose`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejakv.blend.forced import ForcedTokens
from dejakv.blend.offsets import offset_runs
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs, sorted_unique

NEAR = 30.0
"""Tokens over which the effect of a small change fades."""
MIN_WEIGHT = 0.1
"""Weight of a token far behind such a change, relative to one right behind it."""

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""Function `choose(scores, forced, count)` that returns the indices of tokens to recompute.

`scores` (float, -1 for a token that must not be chosen) and `forced` (bool) are `[tokens]`. The
indices are ascending and `count` in number. Forced tokens are among them, even beyond `count`.
"""


def highest(scores: Tensor, forced: Tensor, count: int) -> Tensor:
    """Choose all forced tokens and the highest scores up to `count` tokens.

    Of equal scores the first is chosen.

    Examples
    --------
    >>> highest(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([True, False, False]), 2).tolist()
    [0, 1]
    """
    target_count = max(count, int(forced.sum()))
    if target_count >= scores.numel():
        return torch.arange(scores.numel(), device=scores.device)

    ranked = scores.float().masked_fill(forced, float("inf"))
    return ranked.sort(descending=True, stable=True).indices[:target_count].sort().values


def count_of(share: float, tokens: int, exact: int = 0) -> int:
    """Return how many of a prompt's tokens a share pays for.

    It is a share of those behind the exact prefix, and at least the last one.

    Examples
    --------
    >>> count_of(0.2, 100, exact=50), count_of(0.0, 100), count_of(1.0, 100, exact=50)
    (10, 1, 100)
    """
    return tokens if share >= 1.0 else max(1, round(share * (tokens - exact)))


@dataclass(frozen=True)
class TextSurroundings:
    """The text before each token, compared with the text before its donor token.

    Behind an edit a prompt's tokens keep nearly all their context: their state is off near the edit
    and hardly elsewhere, each token by an error of its own. A moved passage has other text before
    it: all its tokens are off, and neighbours alike. So `worth` prefers tokens near the change
    where little changed, and offsets, which carry on the error of neighbours, count by `changed`.

    Attributes
    ----------
    changed : float32 array, shape [tokens]
        Share in [0, 1] of the tokens before a token's copied run, here or in its donor's prompt
        (the longer counts), that the other does not have. It is 1 for a token that differs from its
        donor token.
    behind : Ids, shape [tokens]
        Tokens since the copied run began.
    """

    changed: NDArray[np.float32]
    behind: Ids

    @property
    def worth(self) -> NDArray[np.float32]:
        """Weights of the question's attention, `[tokens]` in (0, 1]."""
        near = np.maximum(MIN_WEIGHT, np.exp(-self.behind / NEAR))
        return (self.changed + (1.0 - self.changed) * near).astype(np.float32)


def surroundings_of(target: Ids, donors: DonorTokens, donor_map: TokenMap) -> TextSurroundings:
    """Compare the text before all tokens.

    The text before a donor that begins late in its prompt is unknown and counts as other text.

    Examples
    --------
    >>> donor_map = TokenMap(np.array([0, 1, 2, 3]), np.ones(4, np.float32), np.zeros(4, np.int64))
    >>> donors = DonorTokens.of([5, 2, 6, 7])
    >>> surroundings_of(np.array([5, 1, 6, 7]), donors, donor_map).changed.tolist()
    [0.0, 1.0, 0.5, 0.5]
    """
    first, _ = equal_runs(target, donors, donor_map.source)
    index = np.arange(len(target))
    equal = donors.ids[donor_map.source] == target
    number, places = donors.number[donor_map.source], donors.positions[donor_map.source]
    changed = np.ones(len(target), dtype=np.float32)

    for donor in sorted_unique(number[equal]).tolist():
        # Place of each target token in the donor's prompt: the same position, or that of the map.
        donor_places = np.where(equal & (number == donor), places, len(target) + len(donors))
        # The earlier of the two: text that stands in place is before everything behind it.
        same_place = _in_place(target, donors, donor)
        donor_places[same_place] = np.minimum(donor_places[same_place], index[same_place])
        begins = sorted_unique(first[equal & (number == donor)])
        shared_before = count_below(donor_places, begins, places[begins])

        longest_before = np.maximum(begins, places[begins])
        # Nothing comes before it in both prompts: nothing has changed there.
        shares = 1.0 - shared_before / np.maximum(longest_before, 1)
        run_of = np.searchsorted(begins, first[equal & (number == donor)])
        changed[equal & (number == donor)] = np.where(longest_before > 0, shares, 0.0)[run_of]
    return TextSurroundings(changed, index - first)


def count_below(values: Ids, stops: Ids, limits: Ids) -> Ids:
    """Count for each query the values below its limit among the first `stop` values.

    The values are divided by one binary digit after another, as in a wavelet matrix (Claude,
    Navarro, SPIRE 2012), so that many queries take no longer than a few sorts.

    Parameters
    ----------
    values : Ids, shape [n]
        Whole numbers from 0 on.
    stops, limits : Ids, shape [q]
        Number of values, and limit, of each query.

    Examples
    --------
    >>> count_below(np.array([3, 0, 5, 1]), np.array([4, 2]), np.array([3, 9])).tolist()
    [2, 2]
    """
    counts, begins, ends = np.zeros(len(stops), dtype=np.int64), np.zeros_like(stops), stops
    top = max(int(values.max(initial=0)), int(limits.max(initial=0)))
    for digit in reversed(range(top.bit_length())):
        ones = (values >> digit & 1).astype(np.bool_)
        zeros_before = np.concatenate([[0], np.cumsum(~ones)])
        zeros_begin, zeros_end = zeros_before[begins], zeros_before[ends]
        # Equal so far: with a 1 in the limit all values with a 0 are below it.
        upper = (limits >> digit & 1).astype(np.bool_)
        counts += np.where(upper, zeros_end - zeros_begin, 0)
        begins = np.where(upper, zeros_before[-1] + begins - zeros_begin, zeros_begin)
        ends = np.where(upper, zeros_before[-1] + ends - zeros_end, zeros_end)
        values = np.concatenate([values[~ones], values[ones]])
    return counts


def _in_place(target: Ids, donors: DonorTokens, donor: int) -> Ids:
    """Return the tokens of the target that stand at the same position in the donor's prompt."""
    begin = donors.starts[donor]

    # A donor that begins late in its prompt stands at its later positions alone.
    position = donors.first[donor]
    length = max(0, min(donors.lengths[donor], len(target) - position))
    same = donors.ids[begin : begin + length] == target[position : position + length]
    return position + np.flatnonzero(same)


@dataclass(frozen=True)
class RecomputePlan:
    """Which tokens of a prompt are recomputed, and how the others move.

    Attributes
    ----------
    share : float
        Share of the tokens behind the exact prefix to recompute.
    similarity : Tensor, shape [tokens]
        Similarity of the token map, in [0, 1].
    forced : bool Tensor, shape [tokens]
        Tokens that are recomputed whatever the share.
    attention : Tensor, shape [tokens], optional
        Attention of the question, which ranks tokens. With None similarity ranks them.
    excluded : bool Tensor, shape [tokens], optional
        Tokens that must not be chosen (see `ForcedTokens`).
    first : int
        Tokens before it exist already and are not recomputed.
    stop : int, optional
        Tokens from it on are computed by somebody else. None if there are none.
    exact : int
        Tokens of the exact prefix.
    runs : Ids, shape [tokens], optional
        Copied runs along which offsets are carried (`offsets.offset_runs`). None for no offsets.
    around : TextSurroundings, optional
        Weights of attention and of offsets. None for 1.
    needs_question_pass : bool
        Whether the question's attention is still to be computed.
    choose : Choose
        Choice among tokens by their scores.
    """

    share: float
    similarity: Tensor
    forced: Tensor
    attention: Tensor | None = None
    excluded: Tensor | None = None
    first: int = 0
    stop: int | None = None
    exact: int = 0
    runs: Ids | None = None
    around: TextSurroundings | None = None
    needs_question_pass: bool = False
    choose: Choose = highest

    @classmethod
    def of(
        cls,
        config: BlendConfig,
        target: Ids,
        donors: DonorTokens,
        donor_map: TokenMap,
        needed: ForcedTokens,
        device: torch.device | str = "cpu",
        *,
        first: int = 0,
        stop: int | None = None,
        choose: Choose = highest,
    ) -> "RecomputePlan":
        """Make the plan of a prompt from its token map and forced tokens.

        The engine adds the question's attention.

        Parameters
        ----------
        config : BlendConfig
            Settings of the blend.
        target : Ids, shape [tokens]
            Tokens of the prompt.
        donors : DonorTokens
            Tokens of the donors.
        donor_map : TokenMap
            Token map of the prompt.
        needed : ForcedTokens
            Forced tokens of the prompt.
        device : torch.device or str
            Device of the plan's tensors.
        first, stop : int
            Tokens between which this plan recomputes (see the attributes).
        choose : Choose
            Choice among tokens by their scores.
        """
        plan = cls(
            config.share,
            torch.from_numpy(donor_map.similarity).to(device),
            torch.from_numpy(needed.forced).to(device),
            excluded=torch.from_numpy(needed.excluded).to(device)
            if needed.excluded.any()
            else None,
            first=first,
            stop=stop,
            exact=needed.exact,
            runs=offset_runs(target, donors, donor_map, needed.exact) if config.offsets else None,
            around=surroundings_of(target, donors, donor_map) if config.surroundings else None,
            choose=choose,
        )
        # Where nothing is ranked, the question's own pass would be for nothing.
        return replace(plan, needs_question_pass=config.needs_question_pass and plan._ranks)

    def with_attention(self, attention: Tensor) -> "RecomputePlan":
        """Return the plan with the question's attention to each token, `[tokens]`."""
        return replace(self, attention=attention, needs_question_pass=False)

    @property
    def end(self) -> int:
        """Place behind the last token that this plan may recompute."""
        return len(self.forced) if self.stop is None else self.stop

    @property
    def count(self) -> int:
        """Number of tokens from `first` to `stop` that the share pays for.

        Forced tokens from `stop` on are subtracted.
        """
        n = len(self.forced)
        # The exact prefix exists already, so the share is of what comes behind it.
        paid = min(count_of(self.share, n, max(self.first, self.exact)), n - self.first)
        return max(0, paid - int(self.forced[self.end :].sum()))

    @property
    def minimum_count(self) -> int:
        """Number of tokens from `first` to `stop` that are recomputed, whatever ranks them."""
        return max(self.count, int(self.forced[self.first : self.end].sum()))

    @property
    def _ranks(self) -> bool:
        """Whether scores matter.

        They do if more than the forced tokens are recomputed, and not all others that may be
        chosen.
        """
        count, forced = self.count, self.forced[self.first : self.end]

        free = (
            ~forced if self.excluded is None else ~(forced | self.excluded[self.first : self.end])
        )
        return count < self.end - self.first and 0 < count - int(forced.sum()) < int(free.sum())

    @property
    def changed(self) -> NDArray[np.float32] | None:
        """Share of its offset that each token moves by; None for the whole of it."""
        return None if self.around is None else self.around.changed

    @cached_property
    def tokens(self) -> Tensor:
        """Recomputed tokens from `first` to `stop`, ascending.

        >>> similarity = torch.tensor([0.9, 0.2, 0.5, 1.0])
        >>> forced = torch.tensor([False, False, False, True])
        >>> RecomputePlan(0.5, similarity, forced).tokens.tolist()
        [1, 3]
        """
        tokens = torch.arange(self.first, self.end, device=self.forced.device)

        target_count = self.count
        if target_count >= len(tokens):
            return tokens

        scores = self._scores[tokens]
        if self.excluded is not None:
            excluded = self.excluded[tokens]
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
        """Return the plan of a pass of the last `tail` tokens, for the question's attention."""
        question_mask = torch.zeros_like(self.forced)
        question_mask[len(question_mask) - tail :] = True
        return RecomputePlan(0.0, self.similarity, question_mask, first=self.first)
