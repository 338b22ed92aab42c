"""Which rows of a blended prompt are worth keeping: new text, computed in every layer."""

import numpy as np
from numpy.typing import NDArray

from dejakv.reuse.token_map import Donors, Ids, TokenMap, equal_runs, stretches


def new_runs(
    target: Ids, donors: Donors, found: TokenMap, computed: NDArray[np.bool_], least: int
) -> tuple[tuple[int, int], ...]:
    """First and stop of each run of at least `least` rows that were `computed` and that the donors do not hold: text that
    stands in a donor in runs of at least `least` tokens is found there again. Media end a run.
    """
    first, stop = equal_runs(target, donors, found.source)
    fresh = computed & (stop - first < least) & (target >= 0)
    return tuple((begin, end) for begin, end in stretches(fresh) if end - begin >= least)
