"""A monotone alignment: the longest runs of equal tokens that keep their order, as a diff tool finds them."""

import difflib

import numpy as np

from dejakv.reuse.token_map import Donors, Ids, TokenMap


def align_map(target: Ids, donors: Donors) -> TokenMap:
    """Equal tokens in order get similarity 1; a token between them takes the next place after its neighbour's, with 0.

    Order is all it knows: whatever moved finds no match. Quadratic in the worst case (difflib).
    """
    n = len(target)
    source = np.full(n, -1, dtype=np.int64)
    matcher = difflib.SequenceMatcher(None, donors.ids.tolist(), target.tolist(), autojunk=False)
    context = np.zeros(n, dtype=np.int64)
    for there, here, size in matcher.get_matching_blocks():
        source[here : here + size] = np.arange(there, there + size)
        left = np.arange(size)
        context[here : here + size] = 2 * np.minimum(left, 12) + np.minimum(left[::-1], 12)
    similarity = (source >= 0).astype(np.float32)
    last = -1
    for i in np.flatnonzero(source < 0):
        last = source[i - 1] if i else -1
        source[i] = min(last + 1, len(donors) - 1)
    return TokenMap(source, similarity, context)
