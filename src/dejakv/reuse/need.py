"""Rows that must be computed whatever the share says: what changed, what follows it in its sentence, and the question.

Too little recomputation does not degrade gracefully: on edited documents a model answers as before the edit. KV of equal
text after a changed value still tells of the old value, so the rest of the sentence goes with it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError
from dejakv.reuse.segments import Segments, rarity, segments, weights_of
from dejakv.reuse.token_map import Donors, Ids, TokenMap, equal_runs

Rule = Literal["changed", "edits", "first", "none"]
RULES: tuple[Rule, ...] = get_args(Rule)

COPIED = 6
"""Common context (left counted double) from which text counts as copied."""
NEW_SHARE = 0.5
"""A sentence is new if less than this of its weight (rare tokens weigh more) was found in one donor sentence."""
LONGEST_TAIL = 64
OPENING = 16
"""Tokens at most that count as the first sentence of a donor."""


@dataclass(frozen=True)
class Need:
    """`forced[i]`: row i is computed in every layer. `changed`: the tokens that caused it, `tail`: rows of the question.

    left   rows not to be chosen: those that a budget did not stretch to, since some of them alone would leave half a sentence,
           and those of the exact prefix
    exact  rows from the beginning whose state is exact: they stand as they are
    """

    forced: NDArray[np.bool_]
    changed: NDArray[np.bool_]
    tail: int
    left: NDArray[np.bool_]
    exact: int = 0

    @property
    def share(self) -> float:
        return float(self.forced.mean())


def need(
    target: Ids,
    donors: Donors,
    found: TokenMap,
    *,
    ends: Ids | None = None,
    rule: Rule = "changed",
    tail: int | None = None,
    min_similarity: float = 0.2,
    budget: float | None = None,
    exact: int = 0,
) -> Need:
    """Which rows are forced.

    rule            `changed`: every token that differs from its donor token, in new sentences also those that equal it by
                    chance, and the rest of their sentences;
                    `edits`: only what changed inside copied text, and sentences that are new (reworded ones are left to
                    the selector); `first`: what `changed` has, and then the first rows of every copied run up to the
                    budget (LegoLink of EPIC, arXiv 2410.15332); `none`: the tail alone
    tail            rows at the end that are the question; None: the last sentence of at least 4 tokens (at most 64)
    min_similarity  below it a token is always computed
    budget          share of the rows that may be forced, None for no limit: sentences are taken whole, those with edits
                    first, then new ones, then reworded ones, short before long, while they fit
    exact           rows from the beginning whose state is exact, fewer than there are

    Raises: ConfigError for an unknown rule or a negative tail.
    """
    if rule not in RULES:
        raise ConfigError(f"rule {rule!r} is unknown: choose one of {', '.join(RULES)}")
    if tail is not None and tail < 1:
        raise ConfigError(f"tail={tail}: at least the last row is computed, give 1 or more")
    n = len(target)
    parts = segments(target, ends)
    rows = min(n, question_length(parts, n) if tail is None else tail)
    forced = np.zeros(n, dtype=bool)
    forced[n - rows :] = True
    changed, left = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    if rule != "none":
        there = segments(donors.ids, ends, donors.starts)
        differs = donors.ids[found.source] != target
        weak = found.similarity < min_similarity
        edits = _edits(found, differs, donors, there) | _openings(found, donors, there)
        new = _new_sentences(target, donors, found, parts, there)
        unknown = new[parts.number] & (differs | (found.context < COPIED))
        lost = differs | unknown | _foreign(target, donors, found, parts, there)
        changed = edits | (unknown if rule == "edits" else lost) | weak
        changed[n - rows :] = False
        changed[:exact] = False
        wanted = rest_of_sentence(changed, parts) & ~forced
        whole = budget is None or rule == "first"
        rest = 0 if budget is None else round(budget * (n - exact))
        taken = wanted if whole else _affordable(wanted, edits, new, parts, rest - rows)
        forced, left = forced | taken, wanted & ~taken
        if rule == "first":
            forced |= _first_rows(target, donors, found, forced, exact, rest)
    forced[:exact] = False
    left[:exact] = True
    return Need(forced, changed, rows, left, exact)


def _affordable(
    wanted: NDArray[np.bool_], edits: NDArray[np.bool_], new: NDArray[np.bool_], parts: Segments, rows: int
) -> NDArray[np.bool_]:
    """Of the wanted rows those of the first sentences, by rank and then length, that `rows` rows pay for."""
    size = np.bincount(parts.number[wanted], minlength=len(parts))
    rank = np.where(new, 1, 2)
    rank[parts.number[wanted & edits]] = 0
    order = np.lexsort((size, rank))
    order = order[size[order] > 0]
    paid = np.zeros(len(parts), dtype=bool)
    paid[order[np.cumsum(size[order]) <= rows]] = True
    return wanted & paid[parts.number]


def question_length(parts: Segments, n: int) -> int:
    """Rows from the start of the last sentence of at least 4 tokens to the end, at most 64."""
    long = np.flatnonzero(parts.stops - parts.starts >= 4)
    start = int(parts.starts[long[-1]]) if long.size else 0
    return max(1, min(n - start, LONGEST_TAIL))


def rest_of_sentence(changed: NDArray[np.bool_], parts: Segments) -> NDArray[np.bool_]:
    """The changed tokens and, in each sentence, everything behind the first of them."""
    index = np.arange(len(changed))
    first = np.full(len(parts), len(changed), dtype=np.int64)
    np.minimum.at(first, parts.number[changed], index[changed])
    return index >= first[parts.number]


def _first_rows(
    target: Ids, donors: Donors, found: TokenMap, forced: NDArray[np.bool_], exact: int, count: int
) -> NDArray[np.bool_]:
    """Of the rows behind the first `exact` that are not forced, those nearest behind the start of their copied run, until
    `count` rows are computed."""
    first, _ = equal_runs(target, donors, found.source)
    free = np.flatnonzero(~forced & (np.arange(len(target)) >= exact))
    order = free[np.argsort(free - first[free], kind="stable")]
    chosen = np.zeros(len(target), dtype=bool)
    chosen[order[: max(0, count - int(forced[exact:].sum()))]] = True
    return chosen


def _openings(found: TokenMap, donors: Donors, there: Segments) -> NDArray[np.bool_]:
    """A prompt's first token holds the attention sink: its state belongs to the first place and to no other, and no other
    belongs there. And the first sentence of a prompt (at most 16 tokens) was computed with next to nothing before it: moved
    behind other text, it is computed anew (LegoLink, arXiv 2410.15332, recomputes the first tokens of every chunk)."""
    place, here = donors.positions[found.source], np.arange(len(found))
    starts = np.asarray(donors.starts)[donors.number[found.source]]
    opening = (there.number[found.source] == there.number[starts]) & (place < OPENING)
    return ((place == 0) | (here == 0) | opening) & (place != here)


def _edits(found: TokenMap, differs: NDArray[np.bool_], donors: Donors, there: Segments) -> NDArray[np.bool_]:
    """Tokens that differ between neighbours that were copied from one sentence, and tokens behind a deletion."""
    n = len(found)
    copied = ~differs & (found.context >= COPIED)
    index = np.arange(n)
    before = np.maximum.accumulate(np.where(~differs, index, -1))
    after = np.minimum.accumulate(np.where(~differs, index, n)[::-1])[::-1]
    inner = differs & (before >= 0) & (after < n)
    one, other = np.maximum(before, 0), np.minimum(after, n - 1)
    gap = found.source[other] - found.source[one]
    # Aligned: both neighbours are in copied text and stand about as far apart in the donor.
    aligned = inner & (gap > 0) & (gap <= other - one + 4) & copied[one] & copied[other]
    jump = np.zeros(n, dtype=bool)
    step = found.source[1:] - found.source[:-1]
    same = there.number[found.source[1:]] == there.number[found.source[:-1]]
    jump[1:] = (step > 1) & (step <= 6) & same & copied[1:] & copied[:-1]
    return aligned | jump


def _foreign(target: Ids, donors: Donors, found: TokenMap, parts: Segments, there: Segments) -> NDArray[np.bool_]:
    """Rare tokens whose equal was found in another sentence than most of their sentence was: "rome" from someone else's home."""
    weight = weights_of(target, rarity(donors.ids, there))
    came = there.number[found.source]
    keys, count = np.unique(parts.number * len(there) + came, return_counts=True)
    order = np.lexsort((count, keys // len(there)))
    most = np.zeros(len(parts), dtype=np.int64)
    most[keys[order] // len(there)] = keys[order] % len(there)
    inside = np.arange(len(target)) > 0  # the first token opens the prompt, and is part of no sentence
    return inside & (came != most[parts.number]) & (found.context < COPIED) & (weight > 0.5 * weight.max())


def _new_sentences(target: Ids, donors: Donors, found: TokenMap, parts: Segments, there: Segments) -> NDArray[np.bool_]:
    """Which target sentences have no counterpart: too little of their weight was found in any one donor sentence."""
    weight = weights_of(target, rarity(donors.ids, there))
    equal = donors.ids[found.source] == target
    pair = parts.number.astype(np.int64) * len(there) + there.number[found.source]
    keys, inverse = np.unique(pair, return_inverse=True)
    mass = np.bincount(inverse, weights=weight * equal, minlength=keys.size)
    most = np.zeros(len(parts))
    np.maximum.at(most, keys // len(there), mass)
    return most < NEW_SHARE * np.bincount(parts.number, weights=weight, minlength=len(parts))
