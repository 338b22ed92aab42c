"""Every run of 32 tokens is found, whatever surrounds it; what is found is equal text and does not overlap."""

from itertools import pairwise

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.find.conftest import check_runs, checked, covered_by, indexed, places

from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN, fingerprints
from dejakv.decide.copied.search import TokenRun, cover

SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(SHORTEST_FINDABLE_RUN, 200),
    around=st.lists(st.integers(0, 100), min_size=4, max_size=4),
    alphabet=st.sampled_from([2, 3, 50, 50_000]),
    seed=SEEDS,
)
def test_a_planted_run_is_found_in_its_full_length(length: int, around: list[int], alphabet: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run = rng.integers(0, 50_000, length)
    noise = [rng.integers(0, alphabet, size) for size in around]
    text = np.concatenate([noise[0], [-1], run, [-2], noise[1]])
    target = np.concatenate([noise[2], [-3], run, [-4], noise[3]])
    found = checked(target, {"text": text})
    assert TokenRun(len(noise[2]) + 1, length, "text", len(noise[0]) + 1) in found.runs


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=2, max_size=6), seed=SEEDS)
@example(pieces=[[0, 1, 2], [0, 9, 2, 1]], seed=0)
def test_covered_are_the_tokens_that_brute_force_covers(pieces: list[list[int]], seed: int) -> None:
    """Texts put together of twelve passages of two to fifty thousand different tokens, some cut, some periodic. Of a periodic prompt that is
    several times as long as its donor a part may be missed, so no passage of the prompt follows itself."""
    assume(all(one != other for one, other in pairwise(pieces[-1])))
    rng = np.random.default_rng(seed)
    alphabets = rng.choice([2, 3, 50, 50_000], 12)
    passages = [rng.integers(0, size, rng.integers(1, 90)) for size in alphabets]
    passages[0] = np.tile(rng.integers(0, 9, 5), 8)
    *texts, target = [np.concatenate([np.empty(0, np.int64), *(passages[n] for n in text)]) for text in pieces]
    held = {str(number): text for number, text in enumerate(texts)}
    assert places(checked(target, held)) == covered_by(target, held)


def test_the_longest_run_comes_first_and_others_are_clipped() -> None:
    words = np.arange(300)
    texts = {"long": words[50:250].copy(), "short": words[:100].copy(), "end": words[200:].copy()}
    found = checked(words, texts)
    assert found.runs == (TokenRun(0, 50, "short", 0), TokenRun(50, 200, "long", 0), TokenRun(250, 50, "end", 50))
    assert found.donors == ("long", "short", "end")


def test_of_equal_runs_the_newest_is_taken() -> None:
    words = np.arange(100)
    assert checked(words, {"old": words.copy(), "new": words.copy()}).donors == ("new",)


def test_a_donor_in_use_comes_before_a_newer_one() -> None:
    first, second = np.arange(100), np.arange(1000, 1060)
    target = np.concatenate([first, [-1], second])
    both = np.concatenate([second, [-2], first])
    assert checked(target, {"both": both, "newer": second.copy()}).donors == ("both",)


def test_a_prompt_of_one_token_is_covered_with_few_comparisons() -> None:
    sevens = np.full(100_000, 7)
    texts = {str(number): np.full(20_000 + number, 7) for number in range(20)} | {"whole": sevens}
    found = checked(sevens, texts)
    assert found.covered == len(sevens)
    assert found.candidates < 1000


def test_of_a_donor_that_is_gone_another_takes_the_place() -> None:
    words = np.arange(100)
    texts = {"old": words[:60].copy(), "gone": words.copy()}
    index = indexed(texts)
    del texts["gone"]
    found = cover(words, index, texts.get)
    assert found.runs == (TokenRun(0, 60, "old", 0),)


def test_tokens_that_changed_behind_the_index_are_not_used() -> None:
    words = np.arange(100)
    other, shorter = words.copy(), words[:40].copy()
    other[50] = -1
    index = indexed({"other": words, "shorter": words})
    texts = {"other": other, "shorter": shorter}
    found = cover(words, index, texts.get)
    check_runs(words, texts, found)
    assert found.covered == 99


def test_a_bound_on_candidates_is_kept_and_leaves_no_place_out() -> None:
    rng = np.random.default_rng(0)
    passages = [rng.integers(0, 49_152, 40) for _ in range(12)]
    texts = {f"{number} {copy}": np.append(passages[number], copy) for number in range(12) for copy in range(10)}
    target = np.concatenate([token for passage in passages for token in (passage, np.array([-1]))])
    index = indexed(texts)
    bound = len(fingerprints(target))
    held = cover(target, index, texts.get, max_windows=1)
    assert held.candidates == bound < 120
    check_runs(target, texts, held)
    assert held.covered == 480


def test_runs_beyond_fingerprints_with_too_many_holders_are_followed() -> None:
    """Thirty texts share a passage in which most places of the older ones are not held: they are found by what is around it."""
    rng = np.random.default_rng(3)
    passage = rng.integers(0, 49_152, 400)
    texts = {
        str(number): np.concatenate([rng.integers(0, 49_152, 50), passage, rng.integers(0, 49_152, 50)])
        for number in range(30)
    }
    found = checked(texts["0"], texts)
    assert found.runs == (TokenRun(0, 500, "0", 0),)
