"""Blend: take similar donors' KV entries token by token, and recompute the tokens that need it (SemShareKV, arXiv 2509.24832).

The steps that know only tokens, and the report. An engine does the rest. The answer is approximate, so the state that a blend leaves is
never used as exact: its recomputed tokens may serve later blends (`token_map.new_text`), the others nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dejakv.blend.forced import ForcedTokens, need
from dejakv.blend.maps import token_map
from dejakv.blend.recomputed import count_of
from dejakv.blend.settings import BlendConfig, too_dear
from dejakv.blend.token_map import DonorTokens, Embed, Ids, TokenMap, with_prefix


@dataclass(frozen=True)
class BlendReport:
    """Cost of blending one prompt, in tokens, bytes and seconds of reading donors; or, if it was computed exactly, the `reason`.

    rows      recomputed tokens of each layer (all the same, but for top-layer reuse)
    active    indices of the recomputed tokens; None: all
    asked     tokens computed by the question's own pass, for the ranking: not part of `rows`
    """

    tokens: int
    rows: tuple[int, ...] = ()
    active: tuple[int, ...] | None = field(default=None, repr=False)
    asked: float = 0.0
    read_s: float = 0.0
    read_bytes: int = 0
    reason: str = ""

    @property
    def share(self) -> float:
        """Share of recomputed tokens, the mean over the layers, without the question's own pass."""
        return sum(self.rows) / (len(self.rows) * self.tokens) if self.rows else 1.0

    @property
    def blended(self) -> bool:
        return bool(self.rows)


def find(
    target: Ids,
    donors: DonorTokens,
    embed: Embed,
    config: BlendConfig,
    ends: Ids | None,
    exact: Sequence[bool] = (),
    first: int = 0,
) -> tuple[TokenMap, ForcedTokens]:
    """Make the token map of one prompt and mark its forced tokens.

    ends   ids of tokens that end a sentence
    exact  whether each donor's state is that of full computation from its first token on: as far as its tokens are the prompt's from the
           beginning, it is this prompt's own state
    first  tokens from the beginning that are exact already, whatever the donors hold
    """
    donor_map, prefix_tokens = with_prefix(
        token_map(config.map, target, donors, embed, ends=ends), target, donors, exact
    )
    budget = None if config.by_need else config.share
    return donor_map, need(
        target, donors, donor_map, ends=ends, tail=config.tail, budget=budget, exact=max(prefix_tokens, first)
    )


def not_worth(config: BlendConfig, needed: ForcedTokens) -> str:
    """Return the reason not to blend a prompt with these forced tokens; empty if blending pays.

    >>> import numpy as np
    >>> forced = np.array([True, True, True, False])
    >>> not_worth(BlendConfig(max_share=0.5), ForcedTokens(forced, forced, tail=1, left=~forced))
    'too little is alike: 75% of the prompt must be computed'
    """
    tokens = len(needed.forced)
    count = max(count_of(config.share, tokens, needed.exact), needed.share * tokens)
    return too_dear(config, needed.share, count / tokens)
