"""Token maps by name, which decide the quality of a blend more than the ranking of tokens does.

| name        | takes                                                                          |
|-------------|--------------------------------------------------------------------------------|
| `context`   | the longest common context; where that is short, the nearest embedding near it |
| `embedding` | the nearest embedding anywhere (SemShareKV, arXiv 2509.24832), exact cosine    |
| `lsh`       | the nearest embedding anywhere, by random hyperplanes                          |

`context` is the default. Its three steps are O(n log n) or hashed:

1. Windows of 25 down to 10 equal tokens are looked up by rolling hashes and extended along their
diagonal, equal sentences as a whole: copied text.
2. Each sentence of the target is paired with the donor sentence that it shares most rare tokens
with: reworded text.
3. A token outside of copied text takes, near its sentence's counterpart (or near where its copied
neighbours point), the donor token with the best cosine plus a little for common context less a
little for each position of distance.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.sentences import Sentences, counterparts, split_sentences
from dejakv.blend.settings import MAPS
from dejakv.blend.token_map import DonorTokens, Embed, Ids, TokenMap, equal_runs, sorted_unique
from dejakv.errors import ConfigError, InputError
from dejakv.vectors.base import normalized

BITS = 256
"""Bits of a signature of the `lsh` map."""

REACH = 12
"""Tokens to either side up to which common context counts."""
COPIED_WINDOWS = ((12, 12), (12, 2), (2, 12), (6, 5), (5, 4))
"""Tokens to the left and right of equal context that count as copied, longest first."""
HALF = 24
"""Positions to either side that step 3 looks at."""
CHUNK = 512
"""Tokens that step 3 compares at once, which bounds its table of cosines."""
DISTANCE_COST, LEFT_BONUS, RIGHT_BONUS = 0.03, 0.06, 0.04
"""Cost of a position of distance, and bonus of a common token to the left and to the right."""
OUTSIDE_COST, GAP_COST = 0.05, 0.5
"""Cost of a position outside the sentence's counterpart, and outside a gap in copied text."""
MIN_RESEMBLANCE = 0.25
"""Resemblance below which a sentence has no counterpart."""
LONGEST_GAP = 8
"""Maximum tokens of a gap in copied text."""


def token_map(
    name: str,
    target: Sequence[int] | Ids,
    donors: DonorTokens,
    embed: Embed,
    *,
    ends: Ids | None = None,
) -> TokenMap:
    """Make the named map.

    Parameters
    ----------
    name : str
        `context`, `embedding` or `lsh`.
    target : Sequence[int] or Ids, shape [n]
        Tokens of the prompt.
    donors : DonorTokens
        Tokens of the donors.
    embed : Embed
        Function that returns input embeddings.
    ends : Ids, optional
        Ids of tokens that end a sentence.

    Raises
    ------
    ConfigError
        For an unknown name.
    InputError
        For an empty target.
    """
    ids = np.asarray(target, dtype=np.int64)
    if ids.size == 0:
        raise InputError("an empty prompt has no token map: give at least one token")
    if name == "context":
        return context_map(ids, donors, embed, ends=ends)
    if name not in MAPS:
        raise ConfigError(f"token map {name!r} is unknown: choose one of {', '.join(MAPS)}")
    return embedding_map(ids, donors, embed, hashed=name == "lsh")


def embedding_map(
    target: Ids, donors: DonorTokens, embed: Embed, *, hashed: bool = False
) -> TokenMap:
    """Map each token to its first equal, or else to the donor token with the nearest embedding.

    Places do not matter. Media match themselves alone.

    Parameters
    ----------
    hashed : bool
        Nearest by random hyperplanes: the fewest bits of a signature differ, and the similarity is
        cos(pi differing / bits). It agrees with exact cosine .65 of the time at 128 bits, .82 at
        256, .95 at 1024 (hidden size 1024).
    """
    donor_ids, first = np.unique(donors.ids, return_index=True)
    target_ids, inverse = np.unique(target, return_inverse=True)

    slots = np.minimum(np.searchsorted(donor_ids, target_ids), donor_ids.size - 1)
    equal = donor_ids[slots] == target_ids
    source, score = np.where(equal, first[slots], 0), equal.astype(np.float32)

    # Media have negative ids and no embedding.
    new, real = np.flatnonzero(~equal & (target_ids >= 0)), np.flatnonzero(donor_ids >= 0)
    if new.size and real.size:
        target_vectors, donor_vectors = (
            normalized(embed(target_ids[new])),
            normalized(embed(donor_ids[real])),
        )
        if hashed:
            planes = (
                np.random.default_rng(0)
                .standard_normal((donor_vectors.shape[1], BITS))
                .astype(np.float32)
            )
            agree = np.sign(target_vectors @ planes) @ np.sign(donor_vectors @ planes).T / BITS
            similar = np.cos(np.pi * (1 - agree) / 2).astype(np.float32)
        else:
            similar = target_vectors @ donor_vectors.T
        # Of equally similar tokens the first, so that a map is always the same.
        best = similar.argmax(1)
        source[new] = first[real[best]]
        score[new] = similar[np.arange(new.size), best].clip(0, 1)

    return TokenMap(source[inverse], score[inverse], np.zeros(len(target), dtype=np.int64))


def context_map(
    target: Ids, donors: DonorTokens, embed: Embed, *, ends: Ids | None = None
) -> TokenMap:
    """Make the default map (see the module). 2,000 tokens take under 5 ms on one core.

    Parameters
    ----------
    ends : Ids, optional
        Ids of tokens that end a sentence.
    """
    padded_donors = _padded(donors)
    padded_target = np.concatenate([_sentinels(REACH, 1), target, _sentinels(REACH, 2)])
    source = np.full(len(target), -1, dtype=np.int64)
    same = (start for start in donors.openings if donors.ids[start] == target[0])
    # A prompt's first token fits another prompt's first alone.
    source[0] = next(same, -1)

    _copied(target, padded_target, padded_donors, source)
    _whole_sentences(target, donors, ends, source)

    unmatched = np.flatnonzero(source < 0)
    if unmatched.size:
        _near(target, donors, embed, ends, source, unmatched)
    return _scored_map(target, donors, embed, source)


def _sentinels(count: int, salt: int) -> Ids:
    # Equal to no token, no medium and no other sentinel.
    return -(np.arange(count, dtype=np.int64) + 1 + salt * (1 << 40)) - (1 << 50)


class _padded:
    """Donor ids with separators, so that no window crosses from one donor into the next."""

    def __init__(self, donors: DonorTokens) -> None:
        parts: list[Ids] = []
        for number, (start, length) in enumerate(zip(donors.starts, donors.lengths, strict=True)):
            parts += [_sentinels(REACH, 2 * number + 3), donors.ids[start : start + length]]
        parts.append(_sentinels(REACH, 2 * len(donors.starts) + 4))

        self.ids = np.concatenate(parts)
        self.place = np.arange(len(donors)) + REACH * (donors.number + 1)
        self.back = np.full(len(self.ids), -1, dtype=np.int64)
        self.back[self.place] = np.arange(len(donors))


class _WindowHashes:
    """Hashes of all windows of one sequence.

    They are differences of a prefix sum, scaled to be free of the position.
    """

    def __init__(self, ids: Ids) -> None:
        # Mixed as in splitmix64: sums of plain ids would be equal by chance.
        x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(32)

        base, inverse = (
            np.uint64(0x2545F4914F6CDD1D),
            np.uint64(pow(0x2545F4914F6CDD1D, -1, 1 << 64)),
        )
        self.powers = np.multiply.accumulate(np.full(len(ids), base, dtype=np.uint64))
        shrink = np.multiply.accumulate(np.full(len(ids), inverse, dtype=np.uint64))
        self.sums = np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(x * shrink)])

    def of(self, begin: Ids, stop: Ids) -> NDArray[np.uint64]:
        """Return the hashes of the windows `[begin, stop)`."""
        return (self.sums[stop] - self.sums[begin]) * self.powers[begin]


def _copied(target: Ids, padded_target: Ids, padded_donors: _padded, source: Ids) -> None:
    """Fill `source` with donor indices of tokens in copied text (step 1)."""
    hashes, donor_hashes = _WindowHashes(padded_target), _WindowHashes(padded_donors.ids)
    n, m = len(target), len(padded_donors.place)
    for before, after in COPIED_WINDOWS:
        todo = np.flatnonzero(source < 0)
        if not todo.size:
            return

        donor_windows = donor_hashes.of(
            padded_donors.place - before, padded_donors.place + after + 1
        )
        order = np.argsort(donor_windows, kind="stable")
        ranked = donor_windows[order]
        target_windows = hashes.of(todo + REACH - before, todo + REACH + after + 1)
        low = np.searchsorted(ranked, target_windows)
        matched = ranked[np.minimum(low, m - 1)] == target_windows
        if not matched.any():
            continue

        todo, low = todo[matched], low[matched]
        # Among equal windows (sorted by place, since the sort is stable) the one nearest to where
        # neighbours point.
        group = np.cumsum(np.concatenate([[True], ranked[1:] != ranked[:-1]])) - 1
        # By window, then by place: one search finds the nearest place of a window.
        keys = group * (2 * m) + order
        wish = group[low] * (2 * m) + np.clip(_expected(source, todo, n, m), 0, m - 1)

        insertion = np.searchsorted(keys, wish)
        after_slot, before_slot = np.minimum(insertion, m - 1), np.maximum(insertion - 1, 0)
        fits = group[after_slot] == group[low]
        fits_before = group[before_slot] == group[low]
        nearer = fits_before & (~fits | (wish - keys[before_slot] <= keys[after_slot] - wish))
        source[todo] = order[np.where(nearer, before_slot, after_slot)]
        # At once: shorter windows are for what longer ones leave.
        _extend(target, padded_donors, source)


def _whole_sentences(target: Ids, donors: DonorTokens, ends: Ids | None, source: Ids) -> None:
    """Fill `source` for each sentence that equals a donor's whole sentence (step 1).

    A sentence needs at least two tokens, of which some have no source yet; all its tokens then get
    a new source. Of several equal donor sentences the one at the nearest place is taken.
    """
    if (source >= 0).all():
        return
    sentences, donor_sentences = (
        split_sentences(target, ends),
        split_sentences(donors.ids, ends, donors.starts),
    )
    # A prompt's first token opens it and is no part of its first sentence.
    openings, places_by_text = set(donors.openings), dict[bytes, list[int]]()
    for start, stop in zip(
        donor_sentences.starts.tolist(), donor_sentences.stops.tolist(), strict=True
    ):
        begin = start + (start in openings)
        places_by_text.setdefault(donors.ids[begin:stop].tobytes(), []).append(begin)

    for start, stop in zip(sentences.starts.tolist(), sentences.stops.tolist(), strict=True):
        begin = start + (start == 0)
        places = places_by_text.get(target[begin:stop].tobytes()) if stop - begin > 1 else None
        if places and (source[begin:stop] < 0).any():
            # In order: the nearest is one of the two around the sentence's own place.
            after = bisect_left(places, begin)
            place = min(places[max(0, after - 1) : after + 1], key=lambda place: abs(place - begin))
            source[begin:stop] = np.arange(place, place + stop - begin)


def _expected(source: Ids, todo: Ids, n: int, m: int) -> Ids:
    """Return the donor places that the nearest matched neighbours point to.

    A neighbour to the left counts first, then one to the right. Without matches these are the same
    places, scaled by `m / n` if the donor (`m` tokens) is shorter than the target (`n` tokens).
    """
    matched = np.flatnonzero(source >= 0)
    if not matched.size:
        return todo * m // max(n, 1) if m < n else todo
    before = np.searchsorted(matched, todo) - 1
    anchor = matched[np.where(before >= 0, before, 0)]
    return source[anchor] + (todo - anchor)


def _extend(target: Ids, padded_donors: _padded, source: Ids) -> None:
    """Extend matches to neighbours as long as tokens stay equal along the diagonal, both ways."""
    n = len(target)
    index = np.arange(n)
    for step in (1, -1):
        matched = source >= 0
        if step == 1:
            anchor = np.maximum.accumulate(np.where(matched, index, -1))
        else:
            anchor = np.minimum.accumulate(np.where(matched, index, n)[::-1])[::-1]
        has = (anchor >= 0) & (anchor < n)
        safe = np.where(has, anchor, 0)
        place = np.clip(
            padded_donors.place[np.maximum(source[safe], 0)] + index - safe,
            0,
            len(padded_donors.ids) - 1,
        )

        equal = has & (padded_donors.ids[place] == target)

        # No break between a token and its anchor: all tokens between them are equal.
        breaks = np.cumsum(~equal[::step])[::step]
        unbroken = equal & (breaks == breaks[safe])
        fill = unbroken & ~matched
        source[fill] = padded_donors.back[place[fill]]


def _near(
    target: Ids, donors: DonorTokens, embed: Embed, ends: Ids | None, source: Ids, unmatched: Ids
) -> None:
    """Fill `source` for the tokens `unmatched` (steps 2 and 3)."""
    n, m = len(target), len(donors)
    sentences, donor_sentences = (
        split_sentences(target, ends),
        split_sentences(donors.ids, ends, donors.starts),
    )
    low, high, pointed, cost = _expected_ranges(
        target, donors, source, unmatched, sentences, donor_sentences
    )
    middle = np.clip((low + high) // 2, 0, m - 1)
    window = np.clip(middle[:, None] + np.arange(-HALF, HALF + 1), 0, m - 1)
    cosine = np.concatenate(
        [
            _cosines(target[chunk], donors.ids[places], embed)
            for chunk, places in zip(
                *(np.split(part, range(CHUNK, len(part), CHUNK)) for part in (unmatched, window)),
                strict=True,
            )
        ]
    )
    scores = cosine
    run = np.ones(window.shape, dtype=bool)
    # A run counts only as far as it is unbroken.
    for back in (1, 2, 3):
        run &= (
            (unmatched >= back)[:, None]
            & (
                target[np.maximum(unmatched - back, 0)][:, None]
                == donors.ids[np.maximum(window - back, 0)]
            )
            & (window >= back)
        )
        scores = scores + LEFT_BONUS * run
    run = np.ones(window.shape, dtype=bool)
    for ahead in (1, 2):
        donor_places, target_places = (
            np.minimum(window + ahead, m - 1),
            np.minimum(unmatched + ahead, n - 1),
        )
        run &= (
            (unmatched + ahead < n)[:, None]
            & (target[target_places][:, None] == donors.ids[donor_places])
            & (window + ahead < m)
        )
        scores = scores + RIGHT_BONUS * run

    outside = np.maximum(low[:, None] - window, 0) + np.maximum(window - high[:, None] + 1, 0)
    scores = scores - cost[:, None] * np.minimum(outside, REACH)
    distance = np.minimum(np.abs(window - pointed[:, None]), REACH)
    scores = scores - np.where(pointed[:, None] >= 0, DISTANCE_COST, 0.0) * distance
    source[unmatched] = window[np.arange(unmatched.size), scores.argmax(1)]


def _expected_ranges(
    target: Ids,
    donors: DonorTokens,
    source: Ids,
    unmatched: Ids,
    sentences: Sentences,
    donor_sentences: Sentences,
) -> tuple[Ids, Ids, Ids, NDArray[np.float32]]:
    """Return where each token should come from.

    Returns
    -------
    low, high : Ids
        Donor range `[low, high)`.
    pointed : Ids
        Place that the copied neighbours point to; -1 where the sentence has no copied token.
    cost : float32 array
        Cost of a position outside the range.
    """
    n, m = len(target), len(donors)
    part = sentences.number[unmatched]
    pointed = np.full(unmatched.size, -1, dtype=np.int64)
    guess = np.clip(unmatched * m // max(n, 1), 0, m - 1)
    gap = np.zeros(unmatched.size, dtype=bool)
    low = high = guess
    matched = np.flatnonzero(source >= 0)

    if matched.size:
        insertion = np.searchsorted(matched, unmatched)
        before_place, after_place = (
            matched[np.maximum(insertion - 1, 0)],
            matched[np.minimum(insertion, matched.size - 1)],
        )
        anchor = np.where(
            (unmatched - before_place <= after_place - unmatched) & (insertion > 0)
            | (insertion == matched.size),
            before_place,
            after_place,
        )

        guess = np.clip(source[anchor] + unmatched - anchor, 0, m - 1)
        pointed = np.where(sentences.number[anchor] == part, guess, -1)

        # A gap in copied text: an equal token from elsewhere is no match for it, it is what an edit
        # put there. The start of the prompt bounds a gap as a copied token does.
        first = np.asarray(donors.starts)[donors.number[source[after_place]]] - 1
        begin, began = (
            np.where(insertion > 0, before_place, -1),
            np.where(insertion > 0, source[before_place], first),
        )
        step = source[after_place] - began
        near = (
            (insertion < matched.size) & (after_place - begin <= LONGEST_GAP + 1) & (began >= first)
        )
        # An edit may have put in or taken out a few tokens.
        gap = near & (step > 0) & (step <= after_place - begin + 4)
        low, high = (
            np.where(gap, np.maximum(began, 0), low),
            np.where(gap, source[after_place] + 1, high),
        )

    best, strength = counterparts(
        target, sentences, donors.ids, donor_sentences, source, sorted_unique(part)
    )
    lost = (strength[part] < MIN_RESEMBLANCE) | (pointed >= 0)
    low = np.where(gap, low, np.where(lost, guess, donor_sentences.starts[best[part]]))
    high = np.where(gap, high, np.where(lost, guess + 1, donor_sentences.stops[best[part]]))
    return low, high, pointed, np.where(gap, GAP_COST, OUTSIDE_COST).astype(np.float32)


def _cosines(ids: Ids, donor_ids: Ids, embed: Embed) -> NDArray[np.float32]:
    """Return the cosine of each token `[n]` with each of its donor tokens `[n, window]`.

    Equal ids count 1, and media tokens match themselves alone.
    """
    unique_ids, row = np.unique(ids, return_inverse=True)
    unique_donor_ids, column = np.unique(donor_ids, return_inverse=True)
    table = np.zeros((unique_ids.size, unique_donor_ids.size), dtype=np.float32)
    target_rows, donor_columns = np.flatnonzero(unique_ids >= 0), unique_donor_ids >= 0
    if target_rows.size and donor_columns.any():
        table[np.ix_(target_rows, donor_columns)] = (
            normalized(embed(unique_ids[target_rows]))
            @ normalized(embed(unique_donor_ids[donor_columns])).T
        )

    slots = np.minimum(np.searchsorted(unique_donor_ids, unique_ids), unique_donor_ids.size - 1)
    equal = unique_donor_ids[slots] == unique_ids
    table[equal, slots[equal]] = 1.0
    return table[row[:, None], column.reshape(donor_ids.shape)]


def _scored_map(target: Ids, donors: DonorTokens, embed: Embed, source: Ids) -> TokenMap:
    """Score by the length of common context: equal tokens .6 to 1, others half their cosine."""
    equal = donors.ids[source] == target
    first, stop = equal_runs(target, donors, source)
    index = np.arange(len(target))
    context = np.where(
        equal, 2 * np.minimum(index - first, REACH) + np.minimum(stop - 1 - index, REACH), 0
    )
    similarity = np.where(equal, 0.6 + 0.4 * np.minimum(context / 12.0, 1.0), 0.0).astype(
        np.float32
    )

    differing = np.flatnonzero(~equal & (target >= 0) & (donors.ids[source] >= 0))
    if differing.size:
        target_vectors, donor_vectors = (
            normalized(embed(target[differing])),
            normalized(embed(donors.ids[source[differing]])),
        )
        similarity[differing] = 0.5 * np.clip((target_vectors * donor_vectors).sum(1), 0, 1)
    return TokenMap(source, similarity, context.astype(np.int64))
