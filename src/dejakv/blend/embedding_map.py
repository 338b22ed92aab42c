"""Embedding maps (SemShareKV, arXiv 2509.24832): each token takes the donor token with the nearest input embedding, at any place."""

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.token_map import Donors, Embed, Ids, TokenMap
from dejakv.vectors.base import normalized

BITS = 256
"""Of a signature."""


def embedding_map(target: Ids, donors: Donors, embed: Embed) -> TokenMap:
    """Exact cosine; equal ids are found by a join, so only the ids that the donor lacks are multiplied out.

    Ties go to the first place, as a plain argmax does.
    """
    known, first = np.unique(donors.ids, return_index=True)
    wanted, inverse = np.unique(target, return_inverse=True)
    place, score = _join(wanted, known, first)
    new = np.flatnonzero((place < 0) & (wanted >= 0))
    real = known >= 0
    if new.size and real.any():
        similar = normalized(embed(wanted[new])) @ normalized(embed(known[real])).T
        best = similar.argmax(1)
        place[new] = first[real][best]
        score[new] = similar[np.arange(new.size), best]
    return _finish(place[inverse], score[inverse])


def lsh_map(target: Ids, donors: Donors, embed: Embed) -> TokenMap:
    """Random hyperplanes: the donor token whose signature differs in the fewest bits; similarity = cos(pi differing / bits).

    Agrees with exact cosine on new tokens .65 of the time at 128 bits, .82 at 256, .95 at 1024 (hidden size 1024).
    """
    mine, theirs = (normalized(embed(np.maximum(ids, 0))) for ids in (target, donors.ids))
    planes = np.random.default_rng(0).standard_normal((theirs.shape[1], BITS)).astype(np.float32)
    agree = np.sign(mine @ planes) @ np.sign(theirs @ planes).T / BITS
    scores = np.cos(np.pi * (1 - agree) / 2).astype(np.float32)
    for here in np.flatnonzero(target < 0):  # media tokens have no embedding: they fit themselves only
        scores[here] = donors.ids == target[here]
    scores[np.ix_(target >= 0, donors.ids < 0)] = 0.0
    best = scores.argmax(1)
    return _finish(best.astype(np.int64), scores[np.arange(len(target)), best])


def _join(wanted: Ids, known: Ids, first: Ids) -> tuple[Ids, NDArray[np.float32]]:
    at = np.minimum(np.searchsorted(known, wanted), known.size - 1)
    equal = known[at] == wanted
    return np.where(equal, first[at], -1).astype(np.int64), equal.astype(np.float32)


def _finish(place: Ids, score: NDArray[np.float32]) -> TokenMap:
    context = np.zeros(place.size, dtype=np.int64)
    return TokenMap(np.maximum(place, 0), np.clip(np.where(place < 0, 0.0, score), 0, 1).astype(np.float32), context)
