"""Which rows of a blended prompt are worth keeping: new text, computed in every layer."""

import numpy as np
from numpy.typing import NDArray

from dejakv.reuse.token_map import Donors, Ids, TokenMap, equal_runs, stretches


def new_text(target: Ids, donors: Donors, found: TokenMap, least: int) -> NDArray[np.bool_]:
    """Which tokens the donors do not hold: text that stands in a donor in runs of at least `least` tokens is found there again.
    Media are none of it."""
    first, stop = equal_runs(target, donors, found.source)
    return (stop - first < least) & (target >= 0)


def long_runs(marked: NDArray[np.bool_], least: int) -> tuple[tuple[int, int], ...]:
    """First and stop of each run of at least `least` marked tokens."""
    return tuple((first, stop) for first, stop in stretches(marked) if stop - first >= least)


def new_runs(
    target: Ids, donors: Donors, found: TokenMap, computed: NDArray[np.bool_], least: int
) -> tuple[tuple[int, int], ...]:
    """First and stop of each run of at least `least` rows that were `computed` and that the donors do not hold (`new_text`)."""
    return long_runs(computed & new_text(target, donors, found, least), least)
