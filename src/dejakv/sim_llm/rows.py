"""Which rows of a prompt take a donor's top-layer KV, from which of its rows, and which are computed."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError
from dejakv.reuse.token_map import Donors, Embed, token_map

Matching = Literal["position", "map"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
TAIL = 32
"""Last tokens that are always computed: where the question stands."""
LEAST_CONTEXT = 2
"""Common context (`TokenMap.context`) below which a token of a map counts as changed."""


@dataclass(frozen=True)
class RowPlan:
    """source  [n] row of the donor that each row takes; -1: computed"""

    source: NDArray[np.int64]

    @property
    def computed(self) -> NDArray[np.int64]:
        """Rows that are computed, ascending; the last row is among them."""
        return np.flatnonzero(self.source < 0)

    @property
    def reused(self) -> int:
        return int((self.source >= 0).sum())


def plan_rows(
    target: tuple[int, ...],
    donor: tuple[int, ...],
    matching: str,
    embed: Embed,
    *,
    tail: int = TAIL,
    ends: NDArray[np.int64] | None = None,
) -> RowPlan:
    """The plan for a prompt and a donor of the same or another length.

    matching  `position`: row i takes the donor's row i, whatever it says, as in Sim-LLM; equal to the donor where the prompts
              are. `map`: equal tokens in common context, wherever they stand (`dejakv.reuse.token_map`); others are computed
    tail      rows at the end that are computed in any case, at least 1; all of a shorter prompt's
    """
    if tail < 1:
        raise ConfigError(f"tail={tail} leaves no row to continue from: give at least 1")
    n = len(target)
    if target == donor:
        source = np.arange(n)
        tail = 1  # identical: nothing is gained by computing more
    elif matching == "position":
        source = np.arange(n)
        source[len(donor) :] = -1
    elif matching == "map":
        found = token_map("context", target, Donors.of(donor), embed, ends=ends)
        equal = np.asarray(donor, np.int64)[found.source] == np.asarray(target, np.int64)
        source = np.where(equal & (found.context >= LEAST_CONTEXT), found.source, -1)
    else:
        raise ConfigError(f"matching={matching!r} is unknown: choose one of {', '.join(MATCHINGS)}")
    source = source.astype(np.int64)
    source[max(0, n - tail) :] = -1
    return RowPlan(source)
