"""A cover as what blending takes: donors in a row, and which of their tokens stands in for each of the prompt's."""

import numpy as np

from dejakv.errors import InputError
from dejakv.find.copied.cover import Cover
from dejakv.find.copied.verify import TokensOf
from dejakv.reuse.token_map import Donors, TokenMap

REACH = 12
"""Tokens of context to either side that count, as in the other maps."""


def donors_of(cover: Cover, tokens_of: TokensOf) -> Donors | None:
    """Token ids of the cover's donors in the order of `cover.donors`; None without donors, or where one is gone."""
    tokens = [tokens_of(donor) for donor in cover.donors]
    held = [ids for ids in tokens if ids is not None]
    return Donors.of(*held) if held and len(held) == len(tokens) else None


def token_map_of(cover: Cover, donors: Donors) -> TokenMap:
    """The map of a prompt: similarity 1 for copied tokens, 0 (and token 0 of the first donor) for those without a donor.

    donors  tokens of `cover.donors`, in that order. Raises: InputError for others.
    """
    if len(donors.starts) != len(cover.donors):
        raise InputError(
            f"a map of {len(cover.donors)} donors was asked for with the tokens of {len(donors.starts)}: "
            "give the tokens of the cover's donors, in their order"
        )
    start_of = dict(zip(cover.donors, donors.starts, strict=True))
    source = np.zeros(cover.tokens, np.int64)
    similarity = np.zeros(cover.tokens, np.float32)
    context = np.zeros(cover.tokens, np.int64)
    for run in cover.runs:
        here = slice(run.start, run.start + run.length)
        left = np.arange(run.length)
        source[here] = start_of[run.donor] + run.source + left
        similarity[here] = 1.0
        context[here] = 2 * np.minimum(left, REACH) + np.minimum(left[::-1], REACH)
    return TokenMap(source, similarity, context)
