"""Token ids of prompts with pictures; hashes of runs: equal where the runs are, different where they are not."""

import numpy as np
import pytest

from dejakv.decide.copied.fingerprints import media_token_ids, run_hashes
from dejakv.identity import MediumSpan


def test_pictures_have_tokens_of_their_own():
    ids = media_token_ids((1, 7, 7, 2, 7), (MediumSpan(1, 2, "ab" * 32),))
    assert ids[0] == 1
    assert ids[1] < 0
    assert ids[1] != ids[2]
    assert ids[4] == 7
    assert np.array_equal(ids[1:3], media_token_ids((7, 7), (MediumSpan(0, 2, "ab" * 32),)))


def test_the_given_ids_stay_as_they_are() -> None:
    ids = np.array([1, 7, 7], dtype=np.int64)
    media_token_ids(ids, (MediumSpan(1, 2, "ab" * 32),))
    assert ids.tolist() == [1, 7, 7]


@pytest.mark.parametrize("width", [1, 2, 3, 18, 31, 32])
def test_hashes_of_different_runs_differ(width: int) -> None:
    """A hundred thousand runs of two tokens' text: weak hashes collide here."""
    tokens = np.random.default_rng(1).integers(0, 2, 100_000)
    runs = {tokens[start : start + width].tobytes() for start in range(len(tokens) - width + 1)}
    assert len(np.unique(run_hashes(tokens, width))) == len(runs)
