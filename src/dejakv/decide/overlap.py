"""What of a prompt stands in its donors, in runs too short for the index of copied text: from it a blend's rows are estimated.

Tokens in runs of eight are those that a blend does not have to compute, to a few percent of the prompt: on retrieved passages 223
were estimated and 235 computed, 314 and 315, 52 and 63 (`docs/plans.md`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejakv.config import SemanticCacheConfig
from dejakv.decide.plan import Ask, Found
from dejakv.request import Prepared
from dejakv.store.base import ChunkMeta
from dejakv.tokens import Ids, with_media

RUN = 8
"""Tokens of the shortest run that counts."""

PAIR = 2
"""The same for `top_layer`, which takes a token wherever its neighbour stands beside it too (`reuse.top_layer`)."""

TokensOf = Callable[[ChunkMeta], Ids]

_FACTOR = np.uint64(0x100000001B3)
_OFFSET = np.uint64(0xCBF29CE484222325)


def overlap(target: Ids, donors: Sequence[Ids], run: int = RUN) -> tuple[tuple[int, int], ...]:
    """First token and length of each stretch of a prompt `[n]` that is covered by runs of `run` tokens of its donors.

    Runs are compared by 64-bit hashes: an estimate, not a proof. Ids are as `with_media` gives them. About 1 ms for 700 tokens and
    16 donors as long.

    >>> overlap(np.arange(20), [np.arange(5, 20)])
    ((5, 15),)
    """
    return _stretches(_covered(target, donors, run))


def measured(
    found: Found, prepared: Prepared, key: str, tokens_of: TokensOf, *, run: int = RUN, exactly: bool = True
) -> Found:
    """With what the donors hold of the prompt whose own chunk would be `key`, in runs of at least `run` tokens.

    tokens_of  a donor's token ids as `with_media` gives them
    exactly    False: runs that were verified already are enough; of other donors the engine finds out
    """
    if not found.donors or found.donors[0].id == key:
        return found
    if not exactly:
        return replace(found, held=found.runs) if found.copied is not None else found
    target = with_media(prepared.token_ids, prepared.spans)
    held = overlap(target, [tokens_of(meta) for meta in found.donors], run)
    return replace(found, held=held, runs=found.runs or held)


def by_context(config: SemanticCacheConfig) -> bool:
    """Whether blends take runs of equal tokens, which can be told before donors are loaded."""
    return config.blend_map == SemanticCacheConfig.blend_map


def estimated(
    found: Found,
    prepared: Prepared,
    key: str,
    ask: Ask,
    config: SemanticCacheConfig,
    tokens_of: TokensOf,
    *,
    exactly: bool,
) -> Found:
    """`measured` in the runs that the method takes; as found for a method that takes none, and for a token map that is not made
    of runs."""
    if ask.method == "top_layer":
        return measured(found, prepared, key, tokens_of, run=PAIR, exactly=exactly)
    if ask.method == "blend" and by_context(config):
        return measured(found, prepared, key, tokens_of, exactly=exactly)
    return found


def _covered(target: Ids, donors: Sequence[Ids], run: int) -> NDArray[np.bool_]:
    """Which tokens of a prompt stand in runs of its donors `[n]`."""
    windows = _hashes(target, run)
    if not len(windows) or not donors:
        return np.zeros(len(target), np.bool_)
    starts = np.flatnonzero(np.isin(windows, np.concatenate([_hashes(donor, run) for donor in donors])))
    change = np.zeros(len(target) + 1, np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + run, -1)
    return np.cumsum(change)[:-1] > 0


def _stretches(covered: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """First token and length of each stretch of tokens that are covered."""
    edges = np.flatnonzero(np.diff(covered, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))


def _hashes(tokens: Ids, run: int) -> NDArray[np.uint64]:
    """Of each window of `run` tokens; empty for fewer."""
    count = max(0, len(tokens) - run + 1)
    values = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(run if count else 0):
        hashes = (hashes ^ values[place : place + count]) * _FACTOR + _OFFSET
    return hashes
