"""Blend: compose a prompt's state of similar donors' KV entries, and recompute some of its tokens.

The method is SemShareKV's (arXiv 2509.24832). This module makes the token map, marks the tokens
that must be recomputed, says when a blend does not pay, and has the report; an engine does the
rest. The answer is approximate, so the state that a blend leaves is never used as exact. A store
keeps only its recomputed tokens in new text (`token_map.mark_new_text`), for later blends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dejakv.blend.forced import ForcedTokens, mark_forced
from dejakv.blend.maps import token_map
from dejakv.blend.recomputed import count_of
from dejakv.blend.settings import BlendConfig, why_too_dear
from dejakv.blend.token_map import DonorTokens, Embed, Ids, TokenMap, with_prefix


@dataclass(frozen=True)
class BlendReport:
    """Cost of blending one prompt, or the reason why it was computed exactly.

    Attributes
    ----------
    tokens : int
        Tokens of the prompt.
    rows : tuple[int, ...]
        Recomputed tokens of each layer, all the same but for top-layer reuse.
    active : tuple[int, ...] or None
        Indices of the recomputed tokens; None if all are. For top-layer reuse a tuple with one such
        value a layer.
    question_tokens : float
        Tokens computed in the separate pass that ranks tokens; not counted in `rows`.
    read_s : float
        Seconds of reading donors.
    read_bytes : int
        Bytes of donors' state that were read.
    reason : str
        Why the prompt was computed exactly; else empty.
    """

    tokens: int
    rows: tuple[int, ...] = ()
    active: tuple[int, ...] | None = field(default=None, repr=False)
    question_tokens: float = 0.0
    read_s: float = 0.0
    read_bytes: int = 0
    reason: str = ""

    @property
    def share(self) -> float:
        """Share of recomputed tokens, the mean over the layers, without the question's own pass."""
        return sum(self.rows) / (len(self.rows) * self.tokens) if self.rows else 1.0

    @property
    def blended(self) -> bool:
        """Whether the prompt was blended."""
        return bool(self.rows)


def map_donors(
    target: Ids,
    donors: DonorTokens,
    embed: Embed,
    config: BlendConfig,
    ends: Ids | None,
    exact: Sequence[bool] = (),
    first: int = 0,
) -> tuple[TokenMap, ForcedTokens]:
    """Make the token map of one prompt and mark its forced tokens.

    Parameters
    ----------
    target : Ids, shape [tokens]
        Tokens of the prompt.
    donors : DonorTokens
        Tokens of the donors.
    embed : Embed
        Function that returns input embeddings.
    config : BlendConfig
        Settings of the blend.
    ends : Ids or None
        Ids of tokens that end a sentence.
    exact : Sequence[bool]
        Whether each donor's state is that of full computation from its first token on. As far as
        its tokens are the prompt's from the beginning, it is this prompt's own state.
    first : int
        Tokens from the beginning that are exact already, whatever the donors are.

    Returns
    -------
    tuple[TokenMap, ForcedTokens]
        The map, with the longest exact prefix of the donors, and the forced tokens.
    """
    donor_map, prefix_tokens = with_prefix(
        token_map(config.map, target, donors, embed, ends=ends), target, donors, exact
    )
    # By need, changed sentences are recomputed even beyond the share.
    budget = None if config.by_need else config.share

    return donor_map, mark_forced(
        target,
        donors,
        donor_map,
        ends=ends,
        tail=config.tail,
        budget=budget,
        exact=max(prefix_tokens, first),
    )


def refusal_reason(config: BlendConfig, needed: ForcedTokens) -> str:
    """Return the reason not to blend a prompt with these forced tokens; empty if blending pays.

    Examples
    --------
    >>> import numpy as np
    >>> forced = np.array([True, True, True, False])
    >>> needed = ForcedTokens(forced, forced, tail=1, excluded=~forced)
    >>> refusal_reason(BlendConfig(max_share=0.5), needed)
    'too little is alike: 75% of the prompt must be computed'
    """
    tokens = len(needed.forced)
    count = max(count_of(config.share, tokens, needed.exact), needed.share * tokens)
    return why_too_dear(config, needed.share, count / tokens)
