"""Top-layer reuse (Sim-LLM): which rows take donors' top-layer KV, and which are computed.

Here are the settings, and the step that knows tokens alone. `prefill` does the rest, through
`Engine.blend`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.maps import token_map
from dejakv.blend.token_map import DonorTokens, Embed, Ids, with_prefix
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.settings import MAX_SHARE, Positive, Share, strict_dataclass

Matching = Literal["position", "map"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
TOP_LAYER_TAIL: int = SemanticCacheConfig.top_layer_tail
UNSOUND = (
    "in an ordinary model every layer attends to its own KV. A prompt that skips the layers below "
    "the top leaves them empty, "
    "so that generated tokens do not see it there (docs/prototypes/sim-llm.md has the measured "
    "answers)"
)
"""Why an ordinary model is refused."""
MIN_CONTEXT = 2
"""Common context (`TokenMap.context`) below which a token of a map counts as changed."""


@strict_dataclass()
class TopLayerConfig:
    """How a prompt takes the top layer's state."""

    tail: Positive = TOP_LAYER_TAIL
    """rows at the end that are always computed: where the question stands"""
    max_share: Share = MAX_SHARE
    """a prompt that needs more rows is computed in full instead"""
    max_computed: Share = 1.0
    """so is one that would compute more rows than this share: an exact prefix is cheaper"""

    @property
    def name(self) -> str:
        """Name of the method."""
        return "top_layer"

    def plan_prefill(self, engine: Any, prepared: Any, donors: Sequence[Any]) -> Any:
        """Plan a prefill from donors' top-layer rows; see `prefill.plan_top_layer`."""
        return import_module("dejakv.prototypes.top_layer.prefill").plan_top_layer(
            engine, prepared, donors, self
        )


def computed_rows(source: Ids) -> Ids:
    """Return the rows that `take_rows` leaves to be computed, ascending, with the last row."""
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
    """Return the donor row of each row of a prompt.

    Parameters
    ----------
    target : Sequence[int]
        Tokens of the prompt.
    donors : DonorTokens
        Tokens of the donors.
    matching : {"position", "map"}
        `position`: row i takes the first donor's row i, whatever its token, as in Sim-LLM. `map`:
        equal tokens in common context, wherever they stand (`dejakv.blend.token_map`), and the
        longest exact prefix; others are computed.
    embed : Embed
        Function that returns input embeddings.
    tail : int
        Rows at the end that are computed in any case, at least 1; all of a shorter prompt's.
    ends : Ids, optional
        Ids of tokens that end a sentence.

    Returns
    -------
    Ids, shape [n]
        Index into `DonorTokens.ids`; -1 for a row that is computed.

    Raises
    ------
    ConfigError
        For another `matching`, or a `tail` below 1.
    """
    if tail < 1:
        raise ConfigError(f"tail={tail} leaves no row to continue from: give at least 1")
    n, ids, first = len(target), np.asarray(target, np.int64), donors.lengths[0]
    if n == first and np.array_equal(ids, donors.ids[:first]):
        # Identical: nothing is gained by computing more.
        source, tail = np.arange(n), 1
    elif matching == "position":
        source = np.arange(n)
        # The donor has no such rows.
        source[first:] = -1
    elif matching == "map":
        donor_map = token_map("context", ids, donors, embed, ends=ends)
        donor_map, prefix_tokens = with_prefix(donor_map, ids, donors, [True] * len(donors.starts))
        usable = (donors.ids[donor_map.source] == ids) & (donor_map.context >= MIN_CONTEXT)
        usable[:prefix_tokens] = True
        source = np.where(usable, donor_map.source, -1)
    else:
        raise ConfigError(f"matching={matching!r} is unknown: choose one of {', '.join(MATCHINGS)}")

    source = source.astype(np.int64)
    source[max(0, n - tail) :] = -1
    return source
