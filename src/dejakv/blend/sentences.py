"""Sentences, as far as token ids tell.

A tokenizer's vocabulary shows where sentences end, and rare ids show which donor sentence a
sentence resembles.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.token_map import Ids

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
    pairs = np.unique(inverse.astype(np.int64) * len(sentences) + sentences.number)
    frequency = np.bincount(pairs // len(sentences), minlength=unique_ids.size)
    return unique_ids, np.log((len(sentences) + 1) / frequency).astype(np.float32)


def weights_of(ids: Ids, unique_ids: Ids, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rarity of each id (see `rarity`); an unknown id weighs as the rarest."""
    slots = np.minimum(np.searchsorted(unique_ids, ids), unique_ids.size - 1)
    return np.where(unique_ids[slots] == ids, weight[slots], weight.max()).astype(np.float32)


def resemblance(
    target: Ids, sentences: Sentences, donor: Ids, donor_sentences: Sentences
) -> NDArray[np.float32]:
    """Compute the cosine of rarity-weighted bags of ids, `[target sentences, donor sentences]`."""
    unique_ids, weight = rarity(donor, donor_sentences)

    def bags(ids: Ids, parts: Sentences) -> NDArray[np.float32]:
        slots = np.minimum(np.searchsorted(unique_ids, ids), unique_ids.size - 1)
        hit = unique_ids[slots] == ids
        bag = np.zeros((len(parts), unique_ids.size), dtype=np.float32)
        bag[parts.number[hit], slots[hit]] = weight[slots[hit]]
        # An id that the donor lacks weighs as its rarest, or a short overlap would look alike.
        lost = np.bincount(parts.number[~hit], minlength=len(parts)) * float(weight.max()) ** 2
        return bag / np.sqrt((bag**2).sum(1) + lost + 1e-9)[:, None].astype(np.float32)

    return bags(target, sentences) @ bags(donor, donor_sentences).T


IN_ORDER = 0.35
"""Bonus for a counterpart that follows its predecessor's.

Documents mostly keep their order, and two sentences of one wording about different things share
more tokens than two wordings of one thing.
"""


def counterparts(
    target: Ids, sentences: Sentences, donor: Ids, donor_sentences: Sentences, source: Ids
) -> tuple[Ids, NDArray[np.float32]]:
    """Return for each target sentence its donor sentence and how alike the two are.

    It is the best path through `resemblance`, where keeping the donor's order is worth `IN_ORDER` a
    step.

    Parameters
    ----------
    source : Ids
        Places of copied tokens (-1 for others), which decide the sentence they are the most of.
    """
    alike = resemblance(target, sentences, donor, donor_sentences)
    score = alike.copy()
    matched = np.flatnonzero(source >= 0)
    pair, count = np.unique(
        sentences.number[matched] * len(donor_sentences) + donor_sentences.number[source[matched]],
        return_counts=True,
    )
    copied = count * 2 > (sentences.stops - sentences.starts)[pair // len(donor_sentences)]
    # More than any resemblance and bonus together: copied text decides.
    score[pair[copied] // len(donor_sentences), pair[copied] % len(donor_sentences)] += 2.0

    predecessors = np.zeros(score.shape, dtype=np.int64)
    before_each = np.arange(len(donor_sentences)) - 1
    # The best path by dynamic programming: each sentence follows its predecessor or jumps.
    for s in range(1, len(sentences)):
        before = score[s - 1]
        jump = int(before.argmax())
        best = float(before[jump])

        follow = before[:-1] + IN_ORDER
        better = follow > best
        predecessors[s, 0] = jump
        predecessors[s, 1:] = np.where(better, before_each[1:], jump)
        score[s, 0] += best
        score[s, 1:] += np.where(better, follow, best)

    path = np.empty(len(sentences), dtype=np.int64)
    path[-1] = int(score[-1].argmax())
    for s in range(len(sentences) - 1, 0, -1):
        path[s - 1] = predecessors[s, path[s]]
    return path, alike[np.arange(len(sentences)), path]
