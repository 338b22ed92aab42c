"""The part of a blend that is exact: as far as a donor's tokens are the prompt's own from the first one on, so is its state."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dejakv.reuse.token_map import Donors, Ids, TokenMap


def with_prefix(found: TokenMap, target: Ids, donors: Donors, exact: Sequence[bool]) -> tuple[TokenMap, int]:
    """The map with the longest exact prefix taken from its donor, and the prefix's length: fewer tokens than the prompt, since
    its last row gives the answer.

    exact  which donors' state is exact; donors not named are not
    """
    held, start = 0, 0
    for first, length, usable in zip(donors.starts, donors.lengths, exact, strict=False):
        shared = min(length, len(target) - 1) if usable else 0
        differs = donors.ids[first : first + shared] != target[:shared]
        same = int(differs.argmax()) if differs.any() else shared
        if same > held:
            held, start = same, first
    if not held:
        return found, 0
    source, similarity, context = found.source.copy(), found.similarity.copy(), found.context.copy()
    source[:held] = start + np.arange(held)
    similarity[:held] = 1.0
    context[:held] = np.maximum(context[:held], held)
    return replace(found, source=source, similarity=similarity, context=context), held
