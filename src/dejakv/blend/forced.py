"""Forced tokens, which are recomputed whatever the share.

They are changed tokens, the rest of their sentences, short copied runs, and the question. Too
little recomputation does not degrade gracefully: on edited documents a model answers as before the
edit. KV of equal text after a changed value still tells of the old value, so the rest of the
sentence goes with it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.sentences import Sentences, rarity, split_sentences, weights_of
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs

COPIED_CONTEXT = 6
"""Common context (left counted double) from which text counts as copied."""
NEW_SHARE = 0.5
"""Share of a sentence's weight below which it is new.

The weight (rare tokens weigh more) is that which stands in one donor sentence.
"""
MIN_SIMILARITY = 0.2
"""Similarity to its donor token below which a token counts as changed."""
SHORT = 8
"""Tokens below which a copied run is recomputed, since it stood in other text.

A path in another tool's result has the state of that result. Such tokens, left as they were, made
most of the divergence of agent turns (docs/results/fidelity.md).
"""
LONGEST_TAIL = 64
"""Maximum tokens of the question, if the settings name no number."""
OPENING = 16
"""Maximum tokens that count as the first sentence of a donor."""


@dataclass(frozen=True)
class ForcedTokens:
    """Forced tokens of a prompt.

    Attributes
    ----------
    forced : bool array, shape [tokens]
        Tokens that are recomputed whatever the share.
    changed : bool array, shape [tokens]
        Changed tokens before the question, whether forced or left.
    tail : int
        Number of tokens of the question, at the end.
    excluded : bool array, shape [tokens]
        Tokens that must not be chosen: the exact prefix, and sentences beyond the budget, of which
        a part would be half a sentence.
    exact : int
        Tokens of the exact prefix, whose state stays as it is.
    """

    forced: NDArray[np.bool_]
    changed: NDArray[np.bool_]
    tail: int
    excluded: NDArray[np.bool_]
    exact: int = 0

    @property
    def share(self) -> float:
        """Share of the prompt that is forced."""
        return float(self.forced.mean())


def mark_forced(
    target: Ids,
    donors: DonorTokens,
    donor_map: TokenMap,
    *,
    ends: Ids | None = None,
    tail: int | None = None,
    budget: float | None = None,
    exact: int = 0,
) -> ForcedTokens:
    """Mark the forced tokens.

    These are every token that differs from its donor token (in new sentences also those that equal
    it by chance) with the rest of its sentence, copied runs of fewer than `SHORT` tokens, and the
    question.

    Parameters
    ----------
    target : Ids, shape [tokens]
        Tokens of the prompt.
    donors : DonorTokens
        Tokens of the donors.
    donor_map : TokenMap
        Token map of the prompt.
    ends : Ids, optional
        Ids of tokens that end a sentence.
    tail : int, optional
        Tokens of the question. None takes the last sentence of at least 4 tokens, at most 64.
    budget : float, optional
        Share of the tokens that may be forced. None for no limit. Sentences are taken whole while
        they fit: those with edits first, then new ones, then reworded ones, short before long.
    exact : int
        Tokens of the exact prefix, fewer than there are.

    Examples
    --------
    >>> donor_map = TokenMap(np.arange(6), np.ones(6, np.float32), np.full(6, 12))
    >>> donors = DonorTokens.of([5, 6, 2, 7, 8, 9])
    >>> mark_forced(np.array([5, 6, 1, 7, 8, 9]), donors, donor_map, tail=1).forced.tolist()
    [False, False, True, True, True, True]
    """
    n = len(target)
    sentences = split_sentences(target, ends)
    rows = min(n, question_length(sentences, n) if tail is None else tail)
    forced = np.zeros(n, dtype=bool)
    forced[n - rows :] = True

    donor_sentences = split_sentences(donors.ids, ends, donors.starts)
    differs = donors.ids[donor_map.source] != target

    edits = _edits(donor_map, differs, donor_sentences) | _openings(
        donor_map, donors, donor_sentences
    )
    new = _new_sentences(target, donors, donor_map, sentences, donor_sentences)

    unknown = new[sentences.number] & (differs | (donor_map.context < COPIED_CONTEXT))
    lost = differs | unknown | _foreign(target, donors, donor_map, sentences, donor_sentences)
    changed = edits | lost | (donor_map.similarity < MIN_SIMILARITY)
    # The question is computed in any case.
    changed[n - rows :] = False
    changed[:exact] = False

    first, stop = equal_runs(target, donors, donor_map.source)
    # A run at the prompt's beginning stood in the same text, however short it is.
    short = (stop - first < SHORT) & (first > 0)
    to_recompute = (rest_of_sentence(changed, sentences) | short) & ~forced
    to_recompute[:exact] = False

    paid = (
        to_recompute
        if budget is None
        else _affordable(to_recompute, edits, new, sentences, round(budget * (n - exact)) - rows)
    )
    forced, excluded = forced | paid, to_recompute & ~paid
    # Last: a long tail may reach into the exact prefix.
    forced[:exact] = False
    excluded[:exact] = True
    return ForcedTokens(forced, changed, rows, excluded, exact)


def _affordable(
    to_recompute: NDArray[np.bool_],
    edits: NDArray[np.bool_],
    new: NDArray[np.bool_],
    sentences: Sentences,
    rows: int,
) -> NDArray[np.bool_]:
    """Mark the rows of the first sentences, by rank and then length, that `rows` rows pay for."""
    size = np.bincount(sentences.number[to_recompute], minlength=len(sentences))
    # Edits matter most: without them the model answers as before the edit.
    rank = np.where(new, 1, 2)
    rank[sentences.number[to_recompute & edits]] = 0

    order = np.lexsort((size, rank))
    order = order[size[order] > 0]

    paid = np.zeros(len(sentences), dtype=bool)
    paid[order[np.cumsum(size[order]) <= rows]] = True
    return to_recompute & paid[sentences.number]


def question_length(sentences: Sentences, n: int) -> int:
    """Count the tokens from the start of the last sentence of at least 4 tokens to the end.

    The count is at most 64.
    """
    long = np.flatnonzero(sentences.stops - sentences.starts >= 4)
    start = int(sentences.starts[long[-1]]) if long.size else 0
    return max(1, min(n - start, LONGEST_TAIL))


def rest_of_sentence(changed: NDArray[np.bool_], sentences: Sentences) -> NDArray[np.bool_]:
    """Mark the changed tokens and, in each sentence, all tokens behind the first of them.

    Examples
    --------
    >>> parts = split_sentences(np.array([5, 1, 6, 7, 1]), ends=np.array([1]))
    >>> rest_of_sentence(np.array([False, False, False, True, False]), parts).tolist()
    [False, False, False, True, True]
    """
    index = np.arange(len(changed))
    first = np.full(len(sentences), len(changed), dtype=np.int64)
    np.minimum.at(first, sentences.number[changed], index[changed])
    return index >= first[sentences.number]


def _openings(
    donor_map: TokenMap, donors: DonorTokens, donor_sentences: Sentences
) -> NDArray[np.bool_]:
    """Mark tokens whose state belongs to the beginning of a prompt and was moved, or moved there.

    A prompt's first token holds the attention sink: its state belongs to the first place and to no
    other, and no other belongs there. The first sentence of a prompt (at most 16 tokens) was
    computed with next to nothing before it, so behind other text it is computed anew (LegoLink,
    arXiv 2410.15332, recomputes the first tokens of every passage).
    """
    place, target_places = donors.positions[donor_map.source], np.arange(len(donor_map))
    starts = np.asarray(donors.starts)[donors.number[donor_map.source]]
    opening = (donor_sentences.number[donor_map.source] == donor_sentences.number[starts]) & (
        place < OPENING
    )
    return ((place == 0) | (target_places == 0) | opening) & (place != target_places)


def _edits(
    donor_map: TokenMap, differs: NDArray[np.bool_], donor_sentences: Sentences
) -> NDArray[np.bool_]:
    """Mark differing tokens between copied neighbours about as far apart in the donor.

    The first token after a deletion of at most 5 donor tokens within a sentence is marked as well.
    """
    n = len(donor_map)
    copied = ~differs & (donor_map.context >= COPIED_CONTEXT)
    index = np.arange(n)
    before = np.maximum.accumulate(np.where(~differs, index, -1))
    after = np.minimum.accumulate(np.where(~differs, index, n)[::-1])[::-1]
    inner = differs & (before >= 0) & (after < n)
    before_place, after_place = np.maximum(before, 0), np.minimum(after, n - 1)
    gap = donor_map.source[after_place] - donor_map.source[before_place]
    # Aligned: both neighbours are in copied text and stand about as far apart in the donor.
    aligned = (
        inner
        & (gap > 0)
        & (gap <= after_place - before_place + 4)
        & copied[before_place]
        & copied[after_place]
    )

    jump = np.zeros(n, dtype=bool)
    step = donor_map.source[1:] - donor_map.source[:-1]
    same = (
        donor_sentences.number[donor_map.source[1:]]
        == donor_sentences.number[donor_map.source[:-1]]
    )
    # A few of the donor's tokens are skipped: here they were deleted.
    jump[1:] = (step > 1) & (step <= 6) & same & copied[1:] & copied[:-1]
    return aligned | jump


def _foreign(
    target: Ids,
    donors: DonorTokens,
    donor_map: TokenMap,
    sentences: Sentences,
    donor_sentences: Sentences,
) -> NDArray[np.bool_]:
    """Mark rare tokens whose equal stands in another sentence than most of their sentence does.

    An example is "rome" from someone else's home.
    """
    weight = weights_of(target, *rarity(donors.ids, donor_sentences))
    source_sentence = donor_sentences.number[donor_map.source]
    keys, count = np.unique(
        sentences.number * len(donor_sentences) + source_sentence, return_counts=True
    )

    order = np.lexsort((count, keys // len(donor_sentences)))
    main_sentence = np.zeros(len(sentences), dtype=np.int64)
    main_sentence[keys[order] // len(donor_sentences)] = keys[order] % len(donor_sentences)

    # The first token opens the prompt, and is part of no sentence.
    inside = np.arange(len(target)) > 0
    return (
        inside
        & (source_sentence != main_sentence[sentences.number])
        & (donor_map.context < COPIED_CONTEXT)
        & (weight > 0.5 * weight.max())
    )


def _new_sentences(
    target: Ids,
    donors: DonorTokens,
    donor_map: TokenMap,
    sentences: Sentences,
    donor_sentences: Sentences,
) -> NDArray[np.bool_]:
    """Return which target sentences have no counterpart.

    Too little of their weight stands in any one donor sentence.
    """
    weight = weights_of(target, *rarity(donors.ids, donor_sentences))
    equal = donors.ids[donor_map.source] == target
    pair = (
        sentences.number.astype(np.int64) * len(donor_sentences)
        + donor_sentences.number[donor_map.source]
    )
    keys, inverse = np.unique(pair, return_inverse=True)

    mass = np.bincount(inverse, weights=weight * equal, minlength=keys.size)
    best_mass = np.zeros(len(sentences))
    np.maximum.at(best_mass, keys // len(donor_sentences), mass)
    return best_mass < NEW_SHARE * np.bincount(
        sentences.number, weights=weight, minlength=len(sentences)
    )
