"""Top-layer reuse (Sim-LLM): which rows of a prompt take donors' top-layer KV, from which of their rows, and which are computed.

Settings, and the step that knows tokens alone. An engine does the rest (`Engine.blend`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.maps import token_map
from dejakv.blend.settings import TOP_LAYER_TAIL
from dejakv.blend.token_map import DonorTokens, Embed, Ids, with_prefix
from dejakv.errors import ConfigError
from dejakv.settings import MAX_SHARE, Positive, Share, check_fields

Matching = Literal["position", "map"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
LEAST_CONTEXT = 2
"""Common context (`TokenMap.context`) below which a token of a map counts as changed."""


@dataclass(frozen=True)
class TopLayerConfig:
    """How a prompt takes the top layer's state.

    tail          rows at the end that are always computed: where the question stands
    max_share     a prompt that needs more rows is computed in full instead
    max_computed  so is one that would compute more rows than this share: an exact prefix is cheaper
    """

    tail: Positive = TOP_LAYER_TAIL
    max_share: Share = MAX_SHARE
    max_computed: Share = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


def computed_rows(source: Ids) -> Ids:
    """The rows that `take_rows` leaves to be computed, ascending; the last row is among them."""
    return np.flatnonzero(source < 0)


def take_rows(
    target: Sequence[int],
    donors: DonorTokens,
    matching: str,
    embed: Embed,
    *,
    tail: int = TOP_LAYER_TAIL,
    ends: NDArray[np.int64] | None = None,
) -> Ids:
    """For each row of a prompt the index into `DonorTokens.ids` of its donor row, `[n]`; -1: computed. Raises: ConfigError for another
    `matching` or a `tail` below 1.

    matching  `position`: row i takes the first donor's row i, whatever its token, as in Sim-LLM. `map`: equal tokens in common context,
              wherever they stand (`dejakv.blend.token_map`), and the longest exact prefix; others are computed
    tail      rows at the end that are computed in any case, at least 1; all of a shorter prompt's
    """
    if tail < 1:
        raise ConfigError(f"tail={tail} leaves no row to continue from: give at least 1")
    n, ids, first = len(target), np.asarray(target, np.int64), donors.lengths[0]
    if n == first and np.array_equal(ids, donors.ids[:first]):
        source = np.arange(n)
        tail = 1  # identical: nothing is gained by computing more
    elif matching == "position":
        source = np.arange(n)
        # The donor has no such rows.
        source[first:] = -1
    elif matching == "map":
        donor_map = token_map("context", ids, donors, embed, ends=ends)
        donor_map, prefix_tokens = with_prefix(donor_map, ids, donors, [True] * len(donors.starts))
        usable = (donors.ids[donor_map.source] == ids) & (donor_map.context >= LEAST_CONTEXT)
        usable[:prefix_tokens] = True
        source = np.where(usable, donor_map.source, -1)
    else:
        raise ConfigError(f"matching={matching!r} is unknown: choose one of {', '.join(MATCHINGS)}")

    source = source.astype(np.int64)
    source[max(0, n - tail) :] = -1
    return source
