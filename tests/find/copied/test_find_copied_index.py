"""The index of one space: additions, removals, the cap of holders, memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.find.conftest import check_runs, covered_by, indexed, places

from dejakv.decide.copied.fingerprints import IN_A_ROW, WINDOW, Ids, K, fingerprints, fingerprints_of_all
from dejakv.decide.copied.index import MAX_HOLDERS, CopiedIndex
from dejakv.decide.copied.search import cover


def texts_of(count: int, tokens: int = 400, seed: int = 0) -> dict[str, Ids]:
    rng = np.random.default_rng(seed)
    return {str(number): rng.integers(0, 49_152, tokens) for number in range(count)}


def donors(index: CopiedIndex, target: Ids, texts: dict[str, Ids]) -> tuple[str, ...]:
    return cover(target, index, texts.get).donors


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(0, 20)), max_size=60),
    seed=st.integers(0, 1 << 32),
)
def test_after_any_additions_and_removals_what_is_held_is_found_and_nothing_else(
    steps: list[tuple[str, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    texts = {str(number): rng.integers(0, 49_152, 40 + 20 * number) for number in range(21)}
    index, held = CopiedIndex(), dict[str, Ids]()
    for what, number in steps:
        name = str(number)
        if what == "add":
            assert index.add({name: fingerprints(texts[name])}) == ([] if name in held else [name])
            held[name] = texts[name]
        else:
            assert index.remove(name) == (held.pop(name, None) is not None)
    assert len(index) == len(held)
    target = np.concatenate(list(texts.values()))
    found = cover(target, index, texts.get)
    check_runs(target, texts, found)
    assert places(found) == covered_by(target, held)


def test_memory_is_that_of_what_is_held_however_much_passed_through() -> None:
    texts = texts_of(400, 2_000)
    index = CopiedIndex()
    sizes: list[int] = []
    for number, (name, text) in enumerate(texts.items()):
        index.add({name: fingerprints(text)})
        if number >= 20:
            index.remove(str(number - 20))
            sizes.append(index.entries)
    assert max(sizes) < 21 * 2_000 / 3
    for name in texts:
        index.remove(name)
    assert (len(index), index.entries) == (0, 0)


def test_at_most_four_bytes_a_token() -> None:
    texts = texts_of(100, 4_000)
    assert 12 * indexed(texts).entries < 4 * 400_000


def test_a_fingerprint_keeps_the_newest_holders() -> None:
    words = np.arange(40)
    index = CopiedIndex()
    for number in range(100):
        index.add({str(number): fingerprints(words)})
    holders = index.holders(np.unique(fingerprints(words).keys))
    names = {holders.names[number] for number in holders.numbers.tolist()}
    assert names == {str(number) for number in range(100 - MAX_HOLDERS, 100)}
    assert index.entries < 50 * len(fingerprints(words)), "what is beyond the cap takes no memory"


def test_removed_holders_do_not_count_as_holders() -> None:
    words, large = np.arange(40), np.arange(1_000, 11_000)
    index = indexed({"large": large, "first": words, **{str(number): words for number in range(MAX_HOLDERS - 1)}})
    for number in range(MAX_HOLDERS - 1):
        index.remove(str(number))
    for number in range(100, 100 + MAX_HOLDERS - 1):
        index.add({str(number): fingerprints(words)})
    holders = index.holders(np.unique(fingerprints(words).keys))
    assert "first" in {holders.names[number] for number in holders.numbers.tolist()}


def test_about_one_place_in_eight_is_kept_and_none_are_far_apart() -> None:
    found = fingerprints(np.random.default_rng(0).integers(0, 49_152, 200_000))
    assert len(found) == pytest.approx(200_000 / 8, rel=0.03)
    assert np.diff(found.positions).max() <= WINDOW
    assert np.diff(found.positions).min() >= 1


@pytest.mark.parametrize("period", [1, 2, 7, 14])
def test_text_that_repeats_itself_keeps_few_places(period: int) -> None:
    found = fingerprints(np.tile(np.arange(period), 10_000))
    assert len(found) == IN_A_ROW


@given(
    lengths=st.lists(st.integers(0, 90), max_size=12),
    seed=st.integers(0, 1 << 32),
    words=st.sampled_from([1, 2, 40_000]),
)
def test_texts_at_once_have_the_fingerprints_of_each_and_are_held_alike(
    lengths: list[int], seed: int, words: int
) -> None:
    rng = np.random.default_rng(seed)
    texts = {str(number): rng.integers(0, words, length) for number, length in enumerate(lengths)}
    at_once = dict(zip(texts, fingerprints_of_all(list(texts.values())), strict=True))
    for name, text in texts.items():
        alone = fingerprints(text)
        assert at_once[name].keys.tolist() == alone.keys.tolist()
        assert at_once[name].positions.tolist() == alone.positions.tolist()
        assert len(alone) == 0 or alone.positions.max() <= len(text) - K
    one_by_one, together = indexed(texts), CopiedIndex()
    together.add(at_once)
    target = np.concatenate([np.empty(0, np.int64), *texts.values()])
    keys = np.unique(fingerprints(target).keys)
    first, second = one_by_one.holders(keys), together.holders(keys)
    assert len(one_by_one) == len(together)
    assert first.keys.tolist() == second.keys.tolist()
    assert len(first.numbers) == len(second.numbers)
