"""Forced tokens, recomputed whatever the share: changed tokens, the rest of their sentences, short copied runs, and the question.

Too little recomputation does not degrade gracefully: on edited documents a model answers as before the edit. KV of equal
text after a changed value still tells of the old value, so the rest of the sentence goes with it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.sentences import Sentences, rarity, segments, weights_of
from dejakv.blend.token_map import DonorTokens, Ids, TokenMap, equal_runs

COPIED = 6
"""Common context (left counted double) from which text counts as copied."""
NEW_SHARE = 0.5
"""A sentence is new if less than this of its weight (rare tokens weigh more) was found in one donor sentence."""
LEAST_SIMILARITY = 0.2
"""A token that matches its donor token less counts as changed."""
SHORT = 8
"""A copied run of fewer tokens stood in other text: a path in another tool's result has the state of that result. Such tokens, left as they
were, made most of the divergence of agent turns (docs/results/fidelity.md)."""
LONGEST_TAIL = 64
OPENING = 16
"""Tokens at most that count as the first sentence of a donor."""


@dataclass(frozen=True)
class ForcedTokens:
    """Forced tokens of a prompt. Arrays are `[tokens]` bool.

    forced   recomputed whatever the share
    changed  changed tokens before the question, each forced or left
    tail     number of tokens of the question, at the end
    left     not to be chosen: sentences beyond the budget, of which a part alone would be half a sentence, and the exact prefix
    exact    tokens of the exact prefix, whose state stays as it is
    """

    forced: NDArray[np.bool_]
    changed: NDArray[np.bool_]
    tail: int
    left: NDArray[np.bool_]
    exact: int = 0

    @property
    def share(self) -> float:
        """Share of the prompt that is forced."""
        return float(self.forced.mean())


def need(
    target: Ids,
    donors: DonorTokens,
    donor_map: TokenMap,
    *,
    ends: Ids | None = None,
    tail: int | None = None,
    budget: float | None = None,
    exact: int = 0,
) -> ForcedTokens:
    """Mark the forced tokens: every token that differs from its donor token, in new sentences also those that equal it by chance, and
    the rest of their sentences; copied runs of fewer than `SHORT` tokens; and the question.

    tail    tokens of the question; None: the last sentence of at least 4 tokens (at most 64)
    budget  share of the tokens that may be forced, None for no limit: sentences are taken whole while they fit, those with edits
            first, then new ones, then reworded ones, short before long
    exact   tokens of the exact prefix, fewer than there are

    >>> donor_map = TokenMap(np.arange(6), np.ones(6, np.float32), np.full(6, 12))
    >>> need(np.array([5, 6, 1, 7, 8, 9]), DonorTokens.of([5, 6, 2, 7, 8, 9]), donor_map, tail=1).forced.tolist()
    [False, False, True, True, True, True]
    """
    n = len(target)
    sentences = segments(target, ends)
    rows = min(n, question_length(sentences, n) if tail is None else tail)
    forced = np.zeros(n, dtype=bool)
    forced[n - rows :] = True

    donor_sentences = segments(donors.ids, ends, donors.starts)
    differs = donors.ids[donor_map.source] != target
    edits = _edits(donor_map, differs, donors, donor_sentences) | _openings(donor_map, donors, donor_sentences)
    new = _new_sentences(target, donors, donor_map, sentences, donor_sentences)
    unknown = new[sentences.number] & (differs | (donor_map.context < COPIED))
    lost = differs | unknown | _foreign(target, donors, donor_map, sentences, donor_sentences)
    changed = edits | lost | (donor_map.similarity < LEAST_SIMILARITY)
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
    to_recompute: NDArray[np.bool_], edits: NDArray[np.bool_], new: NDArray[np.bool_], sentences: Sentences, rows: int
) -> NDArray[np.bool_]:
    """Of the wanted rows those of the first sentences, by rank and then length, that `rows` rows pay for."""
    size = np.bincount(sentences.number[to_recompute], minlength=len(sentences))
    rank = np.where(new, 1, 2)
    rank[sentences.number[to_recompute & edits]] = 0

    order = np.lexsort((size, rank))
    order = order[size[order] > 0]

    paid = np.zeros(len(sentences), dtype=bool)
    paid[order[np.cumsum(size[order]) <= rows]] = True
    return to_recompute & paid[sentences.number]


def question_length(sentences: Sentences, n: int) -> int:
    """Count the tokens from the start of the last sentence of at least 4 tokens to the end, at most 64."""
    long = np.flatnonzero(sentences.stops - sentences.starts >= 4)
    start = int(sentences.starts[long[-1]]) if long.size else 0
    return max(1, min(n - start, LONGEST_TAIL))


def rest_of_sentence(changed: NDArray[np.bool_], sentences: Sentences) -> NDArray[np.bool_]:
    """Mark the changed tokens and, in each sentence, all tokens behind the first of them.

    >>> parts = segments(np.array([5, 1, 6, 7, 1]), ends=np.array([1]))
    >>> rest_of_sentence(np.array([False, False, False, True, False]), parts).tolist()
    [False, False, False, True, True]
    """
    index = np.arange(len(changed))
    first = np.full(len(sentences), len(changed), dtype=np.int64)
    np.minimum.at(first, sentences.number[changed], index[changed])
    return index >= first[sentences.number]


def _openings(donor_map: TokenMap, donors: DonorTokens, donor_sentences: Sentences) -> NDArray[np.bool_]:
    """A prompt's first token holds the attention sink: its state belongs to the first place and to no other, and no other
    belongs there. And the first sentence of a prompt (at most 16 tokens) was computed with next to nothing before it: moved
    behind other text, it is computed anew (LegoLink, arXiv 2410.15332, recomputes the first tokens of every chunk)."""
    place, target_places = donors.positions[donor_map.source], np.arange(len(donor_map))
    starts = np.asarray(donors.starts)[donors.number[donor_map.source]]
    opening = (donor_sentences.number[donor_map.source] == donor_sentences.number[starts]) & (place < OPENING)
    return ((place == 0) | (target_places == 0) | opening) & (place != target_places)


def _edits(
    donor_map: TokenMap, differs: NDArray[np.bool_], donors: DonorTokens, donor_sentences: Sentences
) -> NDArray[np.bool_]:
    """Tokens that differ although both neighbours were copied from one sentence, and tokens behind a deletion."""
    n = len(donor_map)
    copied = ~differs & (donor_map.context >= COPIED)
    index = np.arange(n)
    before = np.maximum.accumulate(np.where(~differs, index, -1))
    after = np.minimum.accumulate(np.where(~differs, index, n)[::-1])[::-1]
    inner = differs & (before >= 0) & (after < n)
    before_place, after_place = np.maximum(before, 0), np.minimum(after, n - 1)
    gap = donor_map.source[after_place] - donor_map.source[before_place]
    # Aligned: both neighbours are in copied text and stand about as far apart in the donor.
    aligned = inner & (gap > 0) & (gap <= after_place - before_place + 4) & copied[before_place] & copied[after_place]

    jump = np.zeros(n, dtype=bool)
    step = donor_map.source[1:] - donor_map.source[:-1]
    same = donor_sentences.number[donor_map.source[1:]] == donor_sentences.number[donor_map.source[:-1]]
    # A few of the donor's tokens are skipped: here they were deleted.
    jump[1:] = (step > 1) & (step <= 6) & same & copied[1:] & copied[:-1]
    return aligned | jump


def _foreign(
    target: Ids, donors: DonorTokens, donor_map: TokenMap, sentences: Sentences, donor_sentences: Sentences
) -> NDArray[np.bool_]:
    """Rare tokens whose equal was found in another sentence than most of their sentence was: "rome" from someone else's home."""
    weight = weights_of(target, *rarity(donors.ids, donor_sentences))
    source_sentence = donor_sentences.number[donor_map.source]
    keys, count = np.unique(sentences.number * len(donor_sentences) + source_sentence, return_counts=True)
    order = np.lexsort((count, keys // len(donor_sentences)))
    main_sentence = np.zeros(len(sentences), dtype=np.int64)
    main_sentence[keys[order] // len(donor_sentences)] = keys[order] % len(donor_sentences)

    inside = np.arange(len(target)) > 0  # the first token opens the prompt, and is part of no sentence
    return (
        inside
        & (source_sentence != main_sentence[sentences.number])
        & (donor_map.context < COPIED)
        & (weight > 0.5 * weight.max())
    )


def _new_sentences(
    target: Ids, donors: DonorTokens, donor_map: TokenMap, sentences: Sentences, donor_sentences: Sentences
) -> NDArray[np.bool_]:
    """Which target sentences have no counterpart: too little of their weight was found in any one donor sentence."""
    weight = weights_of(target, *rarity(donors.ids, donor_sentences))
    equal = donors.ids[donor_map.source] == target
    pair = sentences.number.astype(np.int64) * len(donor_sentences) + donor_sentences.number[donor_map.source]
    keys, inverse = np.unique(pair, return_inverse=True)

    mass = np.bincount(inverse, weights=weight * equal, minlength=keys.size)
    best_mass = np.zeros(len(sentences))
    np.maximum.at(best_mass, keys // len(donor_sentences), mass)
    return best_mass < NEW_SHARE * np.bincount(sentences.number, weights=weight, minlength=len(sentences))
