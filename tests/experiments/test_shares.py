"""Shares of prefix blocks and of runs found anywhere, against a plain definition of both."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.experiments.shares import BLOCK, SHORTEST_COUNTED_RUN, TokenShare, TokenShares
from dejakv.identity import MediumSpan


def plain(prompts: list[list[int]]) -> list[TokenShare]:
    """The definition, spelled out: whole blocks from the start, and every window of `SHORTEST_COUNTED_RUN` tokens, against earlier prompts."""
    blocks: set[tuple[int, ...]] = set()
    windows: set[tuple[int, ...]] = set()
    shares: list[TokenShare] = []
    for ids in prompts:
        prefix = 0
        while prefix + BLOCK < len(ids) and tuple(ids[: prefix + BLOCK]) in blocks:
            prefix += BLOCK
        covered = set(range(prefix))
        for start in range(len(ids) - SHORTEST_COUNTED_RUN + 1):
            if tuple(ids[start : start + SHORTEST_COUNTED_RUN]) in windows:
                covered |= set(range(start, start + SHORTEST_COUNTED_RUN))
        shares.append(TokenShare(len(ids), prefix, len(covered - {len(ids) - 1})))
        blocks |= {tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)}
        windows |= {
            tuple(ids[start : start + SHORTEST_COUNTED_RUN]) for start in range(len(ids) - SHORTEST_COUNTED_RUN + 1)
        }
    return shares


PIECES = st.lists(st.integers(0, 5), max_size=6)
"""A prompt of up to six pieces out of six, each of 7 to 57 tokens: they come again at other places, and cut."""


def prompt(pieces: list[int], shift: int) -> list[int]:
    return [1000] * shift + [100 * piece + token for piece in pieces for token in range(7 + 10 * piece)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PIECES, st.integers(0, 3)), max_size=8))
def test_shares_are_those_of_the_definition(given_: list[tuple[list[int], int]]) -> None:
    prompts = [prompt(pieces, shift) for pieces, shift in given_]
    shares = TokenShares()
    assert [shares.add(ids) for ids in prompts] == plain(prompts)
    assert shares.total == sum(plain(prompts), TokenShare())


def test_partitions_do_not_see_each_other() -> None:
    ids = list(range(80))
    shares = TokenShares()
    shares.add(ids, "a")
    assert shares.add(ids, "b") == TokenShare(80, 0, 0)
    assert shares.add(ids, "a") == TokenShare(80, 64, 79)


def test_other_pictures_are_other_tokens() -> None:
    """Every picture has the same placeholder tokens: their digests tell them apart."""
    ids = [1, *[7] * 60, 2, 3]
    shares = TokenShares()
    shares.add(ids, spans=[MediumSpan(1, 60, "aa" * 32)])
    assert shares.add(ids, spans=[MediumSpan(1, 60, "bb" * 32)]).anywhere == 0
    assert shares.add(ids, spans=[MediumSpan(1, 60, "aa" * 32)]).anywhere == 62


def test_no_tokens_and_few() -> None:
    shares = TokenShares()
    assert [shares.add(ids) for ids in ([], [1], [1] * 15, [1] * 31)] == [TokenShare(n) for n in (0, 1, 15, 31)]
    assert TokenShare().share_anywhere == 0.0


def test_a_growing_table_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50_000, 700).tolist() for _ in range(40)]
    shares = TokenShares()
    for ids in prompts:
        assert shares.add(ids).anywhere == 0
    for ids in prompts:
        assert shares.add([5, *ids]).anywhere == 699
