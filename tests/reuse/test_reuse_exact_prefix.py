"""What a donor shares with a prompt from its first token on is the prompt's own state: nothing of it is computed in a blend."""

import numpy as np

from dejakv.blend.blend import map_donors
from dejakv.blend.maps import token_map
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, with_prefix

TEXT = np.arange(100, 180)
OTHER = np.arange(500, 560)
PROMPT = np.concatenate([TEXT[:50], OTHER, TEXT[50:]])
DOT = np.array([0])


def embed(ids: np.ndarray) -> np.ndarray:
    return np.eye(8, dtype=np.float32)[np.asarray(ids) % 8]


def test_the_exact_prefix_is_neither_forced_nor_chosen() -> None:
    donors = DonorTokens.of(np.concatenate([OTHER, PROMPT[:50]]), TEXT)
    found, needed = map_donors(PROMPT, donors, embed, BlendConfig(), DOT, [True, True])
    assert needed.exact == 50
    assert (found.source[:50] == len(OTHER) + 50 + np.arange(50)).all()
    assert (found.similarity[:50] == 1).all()
    assert not needed.forced[:50].any()
    assert needed.excluded[:50].all()
    assert needed.forced[-1]


def test_approximate_state_is_no_exact_prefix() -> None:
    donors = DonorTokens.of(TEXT, OTHER)
    for exact in ((), (False, True)):
        assert map_donors(PROMPT, donors, embed, BlendConfig(), DOT, exact)[1].exact == 0


def test_the_last_token_is_computed_even_where_the_donor_is_the_prompt() -> None:
    donors = DonorTokens.of(PROMPT)
    found, needed = map_donors(PROMPT, donors, embed, BlendConfig(), DOT, [True])
    assert needed.exact == len(PROMPT) - 1
    assert needed.forced.sum() == 1
    assert len(found) == len(PROMPT)


def test_the_longest_prefix_of_several_donors_is_taken() -> None:
    donors = DonorTokens.of(PROMPT[:20], OTHER, PROMPT[:70], PROMPT[:60])
    map = token_map("context", PROMPT, donors, embed)
    found, held = with_prefix(map, PROMPT, donors, [True, True, True, True])
    assert held == 70
    assert (donors.number[found.source[:70]] == 2).all()
