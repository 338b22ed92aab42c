"""Counterparts of sentences: the best path, without a table of all pairs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.blend.sentences import COMMON, IN_ORDER, counterparts, rarity, resemblance, split_sentences, weights_of
from dejakv.blend.token_map import Ids

ENDS = np.array([0], dtype=np.int64)
texts = st.lists(st.integers(0, 12), min_size=1, max_size=60).map(lambda ids: np.array(ids, dtype=np.int64))


def cosines(target: Ids, donor: Ids) -> np.ndarray:
    """Resemblance of all pairs of sentences, from bags of all ids."""
    parts, donor_parts = split_sentences(target, ENDS), split_sentences(donor, ENDS)
    ids, weight = rarity(donor, donor_parts)

    def bags(text: Ids, number: Ids, count: int) -> np.ndarray:
        bag = np.zeros((count, 14))
        bag[number, text] = np.where(np.isin(text, ids), weights_of(text, ids, weight), 0)
        lost = np.bincount(number[~np.isin(text, ids)], minlength=count) * float(weight.max()) ** 2
        return bag / np.sqrt((bag**2).sum(1) + lost + 1e-9)[:, None]

    return bags(target, parts.number, len(parts)) @ bags(donor, donor_parts.number, len(donor_parts)).T


@settings(max_examples=100, deadline=None)
@given(target=texts, donor=texts)
def test_counterparts_are_the_best_path_through_all_pairs(target: Ids, donor: Ids) -> None:
    alike = cosines(target, donor)
    parts, donor_parts = split_sentences(target, ENDS), split_sentences(donor, ENDS)
    asked = np.arange(len(parts))
    path, strength = counterparts(target, parts, donor, donor_parts, np.full(len(target), -1), asked)
    assert strength == pytest.approx(alike[asked, path], abs=1e-5)

    best = alike[0]
    for row in alike[1:]:
        follow = np.concatenate([[-np.inf], best[:-1] + IN_ORDER])
        best = row + np.maximum(follow, best.max())
    worth = alike[asked, path].sum() + IN_ORDER * np.count_nonzero(np.diff(path) == 1)
    assert worth == pytest.approx(best.max(), abs=1e-5)


def test_a_document_after_a_few_new_sentences_is_matched_from_its_first_sentence() -> None:
    donor = np.arange(10, 3010).reshape(300, 10)
    donor[:, 9] = 0
    reworded = donor.copy()
    reworded[:, [2, 5]] = 5000 + np.arange(600).reshape(300, 2)
    new = np.arange(9000, 9040).reshape(4, 10)
    new[:, 9] = 0
    target, source = np.concatenate([reworded[299:], new, reworded[:4]]).ravel(), donor.ravel()
    parts, donor_parts = split_sentences(target, ENDS), split_sentences(source, ENDS)
    path, _ = counterparts(target, parts, source, donor_parts, np.full(len(target), -1), np.arange(9))
    assert path[0] == 299
    assert path[5:].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sentences", [1000, 4000])
def test_a_sentence_is_compared_with_a_few_of_any_number(sentences: int) -> None:
    rng = np.random.default_rng(0)
    donor = np.minimum(rng.zipf(1.3, 20 * sentences), 30_000)
    donor[19::20] = 0
    parts = split_sentences(donor, ENDS)
    row, _, cosine = resemblance(donor, parts, donor, parts, np.arange(100))
    assert len(row) <= 100 * 20 * COMMON / 4
    assert cosine[np.flatnonzero(cosine > 0.99)].size >= 95  # each is its own counterpart


@pytest.mark.parametrize("records", [250, 2000])
def test_records_of_few_words_are_paired_in_any_number(records: int) -> None:
    """Each of nine words out of 60: in 2,000 records no word is rare."""
    rng = np.random.default_rng(0)
    donor = rng.integers(1, 61, (records, 10))
    donor[:, 9] = 0
    order = rng.permutation(records)[:200]
    target = donor[order].copy()
    target[np.arange(200), rng.integers(0, 9, 200)] = rng.integers(1, 61, 200)
    parts, donor_parts = split_sentences(target.ravel(), ENDS), split_sentences(donor.ravel(), ENDS)
    fresh = np.full(target.size, -1)
    path, strength = counterparts(target.ravel(), parts, donor.ravel(), donor_parts, fresh, np.arange(200))
    assert (path == order).mean() > 0.95
    assert 0.8 < strength.mean() < 0.95


def test_common_words_count_in_a_resemblance_as_in_that_of_all_pairs() -> None:
    rng = np.random.default_rng(1)
    target, donor = (np.minimum(rng.zipf(1.3, 20 * count), 12) for count in (50, 600))
    target[19::20], donor[19::20] = 0, 0
    parts, donor_parts = split_sentences(target, ENDS), split_sentences(donor, ENDS)
    row, column, cosine = resemblance(target, parts, donor, donor_parts, np.arange(50))
    assert len(row) > 5000
    assert cosine == pytest.approx(cosines(target, donor)[row, column], abs=1e-5)
