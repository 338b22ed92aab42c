"""Sentences, as far as token ids tell.

A tokenizer's vocabulary shows where sentences end, and rare ids show which donor sentence a
sentence resembles.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.token_map import Ids, sorted_unique

_ENDS = (".", "?", "!", "\u3002", "\uff1f", "\uff01", "\n", "\u010a")


def sentence_ends(tokenizer: Any) -> Ids | None:
    """Return the ids of tokens that end a sentence, ascending.

    Their piece ends with a full stop, a question or exclamation mark or a line break (byte-level
    tokenizers spell it as U+010A). The whole vocabulary is read, so the result should be stored.

    Returns
    -------
    Ids or None
        None for a tokenizer without a vocabulary.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    # A special token such as the end of a turn is no part of any sentence.
    special = set(getattr(tokenizer, "all_special_ids", None) or ())

    end_ids = (
        i
        for piece, i in tokenizer.get_vocab().items()
        if piece.endswith(_ENDS) and i not in special
    )
    return np.array(sorted(end_ids), dtype=np.int64)


FIXED = 16
"""Tokens in a sentence where no token is known to end one."""


@dataclass(frozen=True)
class Sentences:
    """Sentences of a text.

    Attributes
    ----------
    number : Ids
        Sentence of each token.
    starts : Ids
        Where each sentence begins.
    stops : Ids
        Where each sentence ends (exclusive).
    """

    number: Ids
    starts: Ids
    stops: Ids

    def __len__(self) -> int:
        return len(self.starts)


def split_sentences(ids: Ids, ends: Ids | None, breaks: tuple[int, ...] = ()) -> Sentences:
    """Cut a text into sentences. Runs of ends stay together.

    Parameters
    ----------
    ids : Ids, shape [n]
        Tokens of the text.
    ends : Ids or None
        Ids of tokens behind which a sentence ends. None for sentences of `FIXED` tokens.
    breaks : tuple[int, ...]
        Indices before which a sentence ends in any case.

    Examples
    --------
    >>> split_sentences(np.array([7, 8, 1, 9, 1, 1, 5]), ends=np.array([1])).starts.tolist()
    [0, 3, 6]
    """
    n = len(ids)
    if ends is None or not len(ends):
        cut = np.arange(n) % FIXED == 0
    else:
        ending = np.isin(ids, ends)
        # Only the last of several ends in a row cuts: "?!" ends one sentence.
        cut = np.zeros(n, dtype=bool)
        cut[1:] = ending[:-1] & ~ending[1:]
        cut[0] = True
    cut[list(breaks)] = True
    starts = np.flatnonzero(cut)
    return Sentences(np.cumsum(cut) - 1, starts, np.append(starts[1:], n))


def rarity(ids: Ids, sentences: Sentences) -> tuple[Ids, NDArray[np.float32]]:
    """Compute inverse document frequencies over sentences.

    Returns
    -------
    Ids
        Unique ids.
    float32 array
        Weight log((S + 1) / df) of each, for S sentences.
    """
    unique_ids, inverse = np.unique(ids, return_inverse=True)
    pairs = sorted_unique(inverse.astype(np.int64) * len(sentences) + sentences.number)
    frequency = np.bincount(pairs // len(sentences), minlength=unique_ids.size)
    return unique_ids, np.log((len(sentences) + 1) / frequency).astype(np.float32)


def weights_of(ids: Ids, unique_ids: Ids, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rarity of each id (see `rarity`); an unknown id weighs as the rarest."""
    slots = np.minimum(np.searchsorted(unique_ids, ids), unique_ids.size - 1)
    return np.where(unique_ids[slots] == ids, weight[slots], weight.max()).astype(np.float32)


COMMON = 256
"""Donor sentences with an id beyond which sharing it alone is no reason to compare two sentences.

Prompts of fewer sentences have no such id. In longer ones each id has few sentences to compare.
"""
_RAREST = 3
"""Ids of a sentence that are a reason though common: the words of some records are all common.

Not those of more than half of the donor's sentences, which tell nothing.
"""
_MOST = 4 * COMMON
"""Most sentences to compare for one of these, evenly from all that have it."""


def resemblance(
    target: Ids, sentences: Sentences, donor: Ids, donor_sentences: Sentences, target_rows: Ids
) -> tuple[Ids, Ids, NDArray[np.float32]]:
    """Compute the cosine of rarity-weighted bags of ids, of sentences that share telling ids.

    Parameters
    ----------
    target_rows : Ids
        Target sentences to compare, ascending.

    Returns
    -------
    row, column : Ids
        Places in `target_rows`, and donor sentences, ascending by row and then by column.
    cosine : float32 array
        Their resemblance, in (0, 1].
    """
    count = len(donor_sentences)
    unique_ids, weight = rarity(donor, donor_sentences)
    highest = float(weight.max()) ** 2
    squares = weight.astype(np.float64) ** 2

    # The sentences with each id, one behind the other.
    slots = np.searchsorted(unique_ids, donor)
    postings = sorted_unique(slots * count + donor_sentences.number)
    slot, holder = np.divmod(postings, count)
    norm = np.bincount(holder, weights=squares[slot], minlength=count)

    rows = np.full(len(sentences), -1, dtype=np.int64)
    rows[target_rows] = np.arange(len(target_rows))
    inside = np.flatnonzero(rows[sentences.number] >= 0)
    ids, row_of = target[inside], rows[sentences.number[inside]]
    slots = np.minimum(np.searchsorted(unique_ids, ids), unique_ids.size - 1)
    hit = unique_ids[slots] == ids
    row, slot = np.divmod(
        sorted_unique(row_of[hit] * unique_ids.size + slots[hit]), unique_ids.size
    )
    # An id that the donor lacks weighs as its rarest, or a short overlap would look alike.
    lost = np.bincount(row_of[~hit], minlength=len(target_rows)) * highest
    row_norm = np.bincount(row, weights=squares[slot], minlength=len(target_rows)) + lost

    # Each id of a sentence with the donor sentences that have it, too: of common ones the rarest.
    first = np.searchsorted(postings, slot * count)
    frequency = np.searchsorted(postings, (slot + 1) * count) - first
    order = np.lexsort((frequency, row))
    rank = np.empty(len(row), dtype=np.int64)
    rank[order] = np.arange(len(row)) - np.searchsorted(row, row)
    common = frequency > COMMON
    telling = (rank < _RAREST) & (2 * frequency <= count)
    times = np.where(common, np.where(telling, np.minimum(frequency, _MOST), 0), frequency)
    nth = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
    nth = nth * np.repeat(frequency, times) // np.repeat(times, times)
    pair = np.repeat(row, times) * count + holder[np.repeat(first, times) + nth]
    pairs, inverse = np.unique(pair, return_inverse=True)
    alone = np.where(common, 0.0, squares[slot])
    shared = np.bincount(inverse, np.repeat(alone, times), len(pairs)).astype(np.float64)
    _add_common(shared, pairs, count, row[common], slot[common], squares, postings)

    row, column = np.divmod(pairs, count)
    cosine = shared / np.sqrt((row_norm[row] + 1e-9) * (norm[column] + 1e-9))
    return row, column, cosine.astype(np.float32)


def _add_common(
    shared: NDArray[np.float64],
    pairs: Ids,
    count: int,
    row: Ids,
    slot: Ids,
    squares: NDArray[np.float64],
    postings: Ids,
) -> None:
    """Add to what pairs of sentences share the common ids `slot` of the target sentences `row`."""
    columns = pairs % count
    begins = np.searchsorted(pairs, row * count)
    ends = np.searchsorted(pairs, (row + 1) * count)
    by_slot = np.argsort(slot, kind="stable")
    slots = slot[by_slot]
    has = np.zeros(count, dtype=np.bool_)
    for common_id in sorted_unique(slots).tolist():
        entries = by_slot[slice(*np.searchsorted(slots, [common_id, common_id + 1]))]
        first, last = np.searchsorted(postings, [common_id * count, (common_id + 1) * count])
        holders = postings[first:last] % count
        has[holders] = True
        for begin, end in zip(begins[entries].tolist(), ends[entries].tolist(), strict=True):
            shared[begin:end] += has[columns[begin:end]] * squares[common_id]
        has[holders] = False


IN_ORDER = 0.35
"""Bonus for a counterpart that follows its predecessor's.

Documents mostly keep their order, and two sentences of one wording about different things share
more tokens than two wordings of one thing.
"""
_EQUAL = 1e-9
"""Difference of equal worths."""
_DECIDES = 2.0
"""More than any resemblance and bonus together: copied text decides."""


def counterparts(
    target: Ids,
    sentences: Sentences,
    donor: Ids,
    donor_sentences: Sentences,
    source: Ids,
    target_rows: Ids,
) -> tuple[Ids, NDArray[np.float32]]:
    """Return for each target sentence its donor sentence and how alike the two are.

    It is the best path through `resemblance`, where keeping the donor's order is worth `IN_ORDER` a
    step. A sentence that is copied for more than half has the sentence that it is copied from.

    Parameters
    ----------
    source : Ids
        Places of copied tokens (-1 for others), which decide the sentence they are the most of.
    target_rows : Ids
        Sentences whose resemblance is asked for, ascending; that of other copied ones is 0.
    """
    count, total = len(sentences), len(donor_sentences)
    matched = np.flatnonzero(source >= 0)
    pair, size = np.unique(
        sentences.number[matched] * total + donor_sentences.number[source[matched]],
        return_counts=True,
    )
    majority = size * 2 > (sentences.stops - sentences.starts)[pair // total]
    copied_from = np.full(count, -1, dtype=np.int64)
    copied_from[pair[majority] // total] = pair[majority] % total

    compared = sorted_unique(np.concatenate([target_rows, np.flatnonzero(copied_from < 0)]))
    row, column, cosine = resemblance(target, sentences, donor, donor_sentences, compared)
    bounds = np.searchsorted(row, np.arange(len(compared) + 1)).tolist()
    alike_of: dict[int, slice] = {
        sentence: slice(begin, end)
        for sentence, (begin, end) in zip(compared.tolist(), pairwise(bounds), strict=True)
    }

    steps = list[_PathStep]()
    for sentence, donor_sentence in enumerate(copied_from.tolist()):
        part = alike_of.get(sentence, slice(0, 0))
        columns, alike = column[part], cosine[part]
        if donor_sentence >= 0:
            copied_alike = alike[columns == donor_sentence]
            columns = np.array([donor_sentence])
            alike = np.append(copied_alike, np.float32(0))[:1]
        last = steps[-1] if steps else None
        # A path that must come through one donor sentence has no other way.
        followed = total if donor_sentence < 0 else 0
        step = _PathStep.after(last, columns, alike, followed)
        steps.append(step.raised(_DECIDES) if donor_sentence >= 0 else step)

    path = np.empty(count, dtype=np.int64)
    strength = np.zeros(count, dtype=np.float32)
    place = steps[-1].best if steps else 0
    for sentence in range(count - 1, -1, -1):
        path[sentence] = place
        strength[sentence], place = steps[sentence].traced(place)
    return path, strength


@dataclass(frozen=True)
class _PathStep:
    """Worth of the paths that end at one sentence's counterpart, by the counterpart.

    Donor sentences that share nothing with it, and follow none of worth, are all worth `rest`.

    Attributes
    ----------
    columns : Ids
        Donor sentences of a worth of their own, ascending.
    alike, worth : float array
        Their resemblance, and the worth of the best path that ends there.
    follows : bool array
        Whether that path comes from the donor sentence before.
    best, best_worth : int, float
        Donor sentence of the greatest worth, and that worth.
    rest : float
        Worth of all other donor sentences from `first` on.
    rest_follows : bool
        Whether their paths come from the donor sentence before.
    first : int
        Steps for which `rest` follows: before this donor sentence no such path began.
    jump : int
        Where a path comes from that does not follow.
    """

    columns: Ids
    alike: NDArray[np.float32]
    worth: NDArray[np.float64]
    follows: NDArray[np.bool_]
    best: int
    best_worth: float
    rest: float
    rest_follows: bool
    first: int
    jump: int

    @classmethod
    def after(
        cls, last: "_PathStep | None", columns: Ids, alike: NDArray[np.float32], total: int
    ) -> "_PathStep":
        """Return the step to a sentence that resembles these donor sentences.

        Those behind others of another worth than `rest` are, too, as far as they are among the
        first `total`.
        """
        if last is None:
            follows = np.zeros(len(columns), np.bool_)
            best_worth, rest, rest_follows, first, jump = 0.0, 0.0, False, 0, 0
            worth = alike.astype(np.float64)
        else:
            best_worth, jump = last.best_worth, last.best
            # A path of `rest` ends where the donor does.
            rest_follows = last.rest + IN_ORDER > best_worth and last.first + 1 < total
            rest = last.rest + IN_ORDER if rest_follows else best_worth
            first = last.first + 1 if rest_follows else 0
            if total:
                followed = np.maximum(last.worth + IN_ORDER, best_worth)
                heirs = last.columns[np.abs(followed - rest) > _EQUAL] + 1
                heirs = np.setdiff1d(heirs[heirs < total], columns, assume_unique=True)
                order = np.argsort(np.concatenate([columns, heirs]), kind="stable")
                columns = np.concatenate([columns, heirs])[order]
                alike = np.concatenate([alike, np.zeros(len(heirs), np.float32)])[order]
            before = last._worth_at(columns - 1) + IN_ORDER
            follows = before > best_worth
            worth = np.maximum(before, best_worth) + alike.astype(np.float64)

        best, best_worth = 0, -np.inf
        if len(columns):
            place = int(worth.argmax())
            best, best_worth = int(columns[place]), float(worth[place])
        if total and rest > best_worth:
            # The first of the others, if any is left.
            others = np.arange(first, min(total, first + len(columns) + 1))
            others = np.setdiff1d(others, columns, assume_unique=True)
            if len(others):
                best, best_worth = int(others[0]), rest
        return cls(
            columns, alike, worth, follows, best, best_worth, rest, rest_follows, first, jump
        )

    def raised(self, worth: float) -> "_PathStep":
        """Return the step with more worth for its only sentence, which all paths then take."""
        raised = self.worth + worth
        return replace(self, worth=raised, best_worth=float(raised.max()))

    def traced(self, place: int) -> tuple[float, int]:
        """Return the resemblance of a donor sentence, and the one before it on the best path."""
        slot = int(np.searchsorted(self.columns, place))
        if slot < len(self.columns) and self.columns[slot] == place:
            follows, alike = bool(self.follows[slot]), float(self.alike[slot])
        else:
            follows, alike = self.rest_follows, 0.0
        return alike, place - 1 if follows else self.jump

    def _worth_at(self, places: Ids) -> NDArray[np.float64]:
        """Return the worth of donor sentences; before `first` there is hardly any."""
        worth = np.where(places < self.first, -np.inf, self.rest)
        if len(self.columns):
            slots = np.minimum(np.searchsorted(self.columns, places), len(self.columns) - 1)
            worth = np.where(self.columns[slots] == places, self.worth[slots], worth)
        return worth
