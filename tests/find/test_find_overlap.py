"""What donors hold of a prompt in short runs, against a search without hashes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.fingerprints import SHORTEST_COPIED_RUN, media_token_ids, overlap
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.finder import DonorFinder
from dejakv.decide.plan import DonorSearch, ReuseRequest
from dejakv.engines.base import Prepared
from dejakv.identity import MediumSpan, exact_key
from dejakv.request import Request
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.open import open_store

words = st.lists(st.integers(0, 3), max_size=60)


@settings(deadline=None)
@given(words, st.lists(words, max_size=3), st.integers(0, 40))
def test_every_run_is_found_and_nothing_else(target: list[int], donors: list[list[int]], copied: int) -> None:
    donors = [*donors, target[copied : copied + 12]]
    there = {
        tuple(donor[at : at + SHORTEST_COPIED_RUN])
        for donor in donors
        for at in range(len(donor) - SHORTEST_COPIED_RUN + 1)
    }
    covered = {
        token
        for at in range(len(target) - SHORTEST_COPIED_RUN + 1)
        if tuple(target[at : at + SHORTEST_COPIED_RUN]) in there
        for token in range(at, at + SHORTEST_COPIED_RUN)
    }
    found = overlap(np.array(target, np.int64), [np.array(donor, np.int64) for donor in donors])
    assert {token for first, length in found for token in range(first, first + length)} == covered
    assert all(later[0] > first + length for (first, length), later in pairwise(found))


@pytest.mark.parametrize(("kept", "new"), [(0, 70), (5, 70), (15, 65), (95, 5)])
def test_what_is_new_lies_behind_what_is_kept(kept: int, new: int) -> None:
    found = DonorSearch(short_runs=((0, 10), (20, 20)))
    assert found.new_tokens(100, kept) == new
    assert DonorSearch().new_tokens(100, kept) == 0


def test_no_run_stands_in_another_picture() -> None:
    tokens = tuple(range(30))
    one, other = ((MediumSpan(5, 20, digest * 20),) for digest in ("a1", "b2"))
    target = media_token_ids(tokens, one)
    assert overlap(target, [media_token_ids(tokens, one)]) == ((0, 30),)
    assert overlap(target, [media_token_ids(tokens, other)]) == ()


def test_a_donor_that_is_alike_in_words_alone_is_not_loaded() -> None:
    """It was: a blend of five sixths of the rows was estimated at a fifth, and the donors' state was loaded to find out."""
    target = Prepared(Request("r", "what is it?", "what is it?", partition="p"), tuple(range(200)), epoch="e")
    pairs = [token if token % 4 > 1 else 2000 + token for token in range(168, 200)]  # too short to be taken
    tokens = (*range(1000, 1150), *range(150, 168), *pairs)
    store = open_store()
    finder = DonorFinder(store, (), (), SemanticCacheConfig(copied_text=False))
    key = exact_key("p", "e", tokens, [])
    meta = StateInfo(key, "p", "e", tokens, "what was it?", "what was it?")
    store.put(StoredState(meta, RawTensor(np.zeros((2, 1, 1, 200, 1), np.float32), "F32")))
    finder.add(meta)
    decision = finder.decide(target, ReuseRequest("blend", named=(key,)), costs=ReuseCosts(row=1e-3))
    assert decision.plan.method == "none"
    assert decision.plan.reason == (
        "min_gain: blend would save 18 tokens beyond the exact prefix, 50 tokens are asked for"
    )
    other = replace(finder.config, blend_map="embedding")  # takes state of tokens that are only alike
    finder.config = other
    assert finder.decide(target, ReuseRequest("blend", named=(key,)), costs=ReuseCosts(row=1e-3)).plan.method == "blend"
