"""A cover as blending's map: every copied token points to an equal one."""

import numpy as np
import pytest
from tests.find.copied.plain import checked

from dejakv.errors import InputError
from dejakv.find.copied.cover import Cover
from dejakv.find.copied.donor_map import donors_of, token_map_of
from dejakv.reuse.token_map import Donors


def test_copied_tokens_point_to_equal_ones_and_others_have_no_similarity() -> None:
    one, other = np.arange(100, 180), np.arange(300, 350)
    texts = {"one": np.concatenate([[1, 2, 3], one]), "other": np.concatenate([other, [4]])}
    target = np.concatenate([[9], other, [8, 7], one])
    found = checked(target, texts)
    donors = donors_of(found, texts.get)
    assert donors is not None
    assert donors.starts == (0, 83)
    mapped = token_map_of(found, donors)
    copied = mapped.similarity == 1
    assert np.flatnonzero(~copied).tolist() == [0, 51, 52]
    assert np.array_equal(donors.ids[mapped.source[copied]], target[copied])
    assert mapped.similarity[~copied].tolist() == [0, 0, 0]
    assert mapped.context[~copied].tolist() == [0, 0, 0]
    assert mapped.context[53] == 12
    assert mapped.context[100] == 36


def test_without_donors_or_with_one_that_is_gone_there_are_no_tokens() -> None:
    words = np.arange(50)
    found = checked(words, {"text": words})
    assert donors_of(found, {}.get) is None
    assert donors_of(Cover(5), {}.get) is None


def test_tokens_of_other_donors_are_refused() -> None:
    words = np.arange(50)
    with pytest.raises(InputError, match="in their order"):
        token_map_of(checked(words, {"text": words}), Donors.of(words, words))
