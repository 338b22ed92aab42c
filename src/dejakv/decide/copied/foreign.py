"""Donors' tokens that may serve, by how much other text their state was computed behind.

A token's state carries all the text before it in its own prompt. Where that text may be a
stranger's (a web page, a mail), the setting `foreign_context` bounds how much of it the state may
have seen beyond what the prompt itself holds.
"""

import numpy as np
from numpy.typing import NDArray

from dejakv.decide.copied.fingerprints import Hashes, Ids, run_hashes

KNOWN_RUN = 8
"""Shortest run of a donor's tokens that counts as text of the prompt, wherever it stands there.

Shorter ones are in most texts, so that a stranger could write any text in them.
"""

HIDDEN = -(1 << 61)
"""Id of a hidden token, less its place: no token, medium or separator of a map has such an id."""


class ForeignContext:
    """Judge of donors' tokens for one prompt.

    Parameters
    ----------
    target : Ids, shape [n]
        Tokens of the prompt.
    limit : int or None
        Tokens before a donor's token, in the donor's prompt, that the target may lack. None for any
        number.

    Examples
    --------
    >>> passage = np.arange(100, 109)
    >>> donor = np.concatenate([[7, 8, 9], passage])
    >>> int((ForeignContext(passage, 3).hide(donor) < 0).sum())
    0
    >>> int((ForeignContext(passage, 2).hide(donor) < 0).sum())
    9
    """

    def __init__(self, target: Ids, limit: int | None) -> None:
        self._target, self._limit = target, limit
        if limit is not None:
            hashes = run_hashes(target, KNOWN_RUN)
            self._order = np.argsort(hashes, kind="stable")
            self._ranked = hashes[self._order]

    def hide(self, donor: Ids, first: int = 0) -> Ids:
        """Return a donor's ids, with those replaced that stand behind too much other text.

        Parameters
        ----------
        donor : Ids, shape [m]
            Tokens of the donor.
        first : int
            Position of the donor's first token in its own prompt. What stands before it is unknown,
            and counts as other text.

        Returns
        -------
        Ids, shape [m]
            The same ids up to some place, and ids from there on that equal no token of any prompt.
        """
        if self._limit is None:
            return donor
        before = first + np.cumsum(~self._known(donor, first))
        # Of each token what stands before it. The count never falls, so that one place parts them.
        usable = int(np.searchsorted(np.append(first, before[:-1]), self._limit, side="right"))
        hidden = donor.copy()
        hidden[usable:] = HIDDEN - np.arange(usable, len(donor))
        return hidden

    def _known(self, donor: Ids, first: int) -> NDArray[np.bool_]:
        """Mark the donor's tokens that the target has: in long runs, or as its beginning.

        A run counts as often as the target has it: its sentence, repeated, is another text.
        """
        known = np.zeros(len(donor), dtype=bool)
        hashes = run_hashes(donor, KNOWN_RUN)
        if len(hashes) and len(self._ranked):
            # The nth run of a hash in the donor is compared with the nth in the target.
            slots = np.searchsorted(self._ranked, hashes) + _occurrences(hashes)
            same = slots < np.searchsorted(self._ranked, hashes, side="right")
            places = self._order[np.where(same, slots, 0)]
            # Hashes only propose: another text of the same hash can be made on purpose.
            for step in range(KNOWN_RUN):
                same &= self._target[places + step] == donor[step : step + len(hashes)]
            for step in range(KNOWN_RUN):
                known[step : step + len(hashes)] |= same

        if first == 0:
            shared = min(len(self._target), len(donor))
            differs = self._target[:shared] != donor[:shared]
            known[: int(differs.argmax()) if differs.any() else shared] = True
        return known


def _occurrences(hashes: Hashes) -> Ids:
    """Return how many equal hashes stand before each one.

    >>> _occurrences(np.array([5, 7, 5, 5], dtype=np.uint64)).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    counts = np.empty(len(hashes), dtype=np.int64)
    counts[order] = np.arange(len(hashes)) - np.searchsorted(ranked, ranked)
    return counts
