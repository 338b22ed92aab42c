"""How far the text before a row differs from the text that stood there when the row's state was computed.

Behind an edit a prompt's rows keep nearly all their context. Their state is off near the edit and hardly anywhere else, each
row by an error of its own. A passage that moved has other text before it, all its rows are off, and neighbours alike. So
`worth` looks for rows near the change where little changed, and takes any row where much did; offsets, which carry on an error
that neighbours share, count by `changed` (docs/results/frontier-smollm2.md has what both bring).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.reuse.token_map import Donors, Ids, TokenMap, equal_runs

NEAR = 30.0
"""Tokens over which a change of a few tokens fades."""
LEAST = 0.1
"""What a row far behind such a change is worth, by one right behind it."""


@dataclass(frozen=True)
class Surroundings:
    """changed  `[tokens]` in [0, 1]: of the tokens before a row's copied run, here or in its donor's prompt (the longer counts),
             the share that the other does not have; 1 for a row whose state is another token's
    behind   `[tokens]`: tokens since the copied run began
    """

    changed: NDArray[np.float32]
    behind: Ids

    @property
    def worth(self) -> NDArray[np.float32]:
        """By what the question's attention to each row counts: `[tokens]` in (0, 1]."""
        near = np.maximum(LEAST, np.exp(-self.behind / NEAR))
        return (self.changed + (1.0 - self.changed) * near).astype(np.float32)


def surroundings_of(target: Ids, donors: Donors, found: TokenMap) -> Surroundings:
    """Of all rows. A donor that begins late in its prompt does not tell what stood before it: that counts as other text."""
    first, stop = equal_runs(target, donors, found.source)
    index = np.arange(len(target))
    equal = donors.ids[found.source] == target
    number, places = donors.number[found.source], donors.positions[found.source]
    changed = np.ones(len(target), dtype=np.float32)
    for donor in np.unique(number[equal]).tolist():
        # Where the donor's prompt has each of the target's tokens: in the same place, or where the map found it.
        there = np.where(equal & (number == donor), places, len(target) + len(donors))
        here = _in_place(target, donors, donor)
        there[here] = np.minimum(there[here], index[here])
        for start in np.unique(first[equal & (number == donor)]).tolist():
            place = int(places[start])
            kept = np.count_nonzero(there[:start] < place)
            changed[start : stop[start]] = 1.0 - kept / max(start, place) if max(start, place) else 0.0
    return Surroundings(changed, index - first)


def _in_place(target: Ids, donors: Donors, donor: int) -> Ids:
    """The target's tokens that stand at the same position in the donor's prompt."""
    begin = donors.starts[donor]
    position = donors.first[donor] if donors.first else 0
    length = max(0, min(donors.lengths[donor], len(target) - position))
    same = donors.ids[begin : begin + length] == target[position : position + length]
    return position + np.flatnonzero(same)
