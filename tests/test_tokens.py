"""Token ids of prompts with pictures."""

import numpy as np

from dejakv.identity import Span
from dejakv.tokens import with_media


def test_pictures_have_tokens_of_their_own():
    ids = with_media((1, 7, 7, 2, 7), (Span(1, 2, "ab" * 32),))
    assert ids[0] == 1
    assert ids[1] < 0
    assert ids[1] != ids[2]
    assert ids[4] == 7
    assert np.array_equal(ids[1:3], with_media((7, 7), (Span(0, 2, "ab" * 32),)))


def test_the_given_ids_stay_as_they_are() -> None:
    given = np.array([1, 7, 7], dtype=np.int64)
    with_media(given, (Span(1, 2, "ab" * 32),))
    assert given.tolist() == [1, 7, 7]
