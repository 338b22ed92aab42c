"""Random programs of changes and adapters: no answer differs from the model's own. `make soak` runs thousands."""

import time

import pytest
from programs import PROMPT_LEARNING, TUNERS, Tally, adapted_model, changed_model
from tests.soak import deadline, soak_rounds, soak_seed


def test_no_answer_of_a_model_that_changes_is_another_than_its_own() -> None:
    tally = Tally()
    for seed in range(soak_seed(), soak_seed() + 6):
        changed_model(seed, tally)
    assert not tally.wrong, tally.wrong[0]
    assert tally.answers == 6 * 36
    assert tally.hits >= 20


@pytest.mark.parametrize("tuner", TUNERS)
def test_no_answer_of_an_adapted_model_is_another_than_its_own(tuner: str) -> None:
    tally = Tally()
    adapted_model(tuner, soak_seed(), tally, changes=2)
    assert not tally.wrong, tally.wrong[0]
    if tuner in PROMPT_LEARNING:
        assert tally.answers >= 12


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_thousands_of_answers_of_models_that_change() -> None:
    tally = Tally()
    until = deadline(0.1)
    first, rounds = 1000 * soak_seed(), 20 * soak_rounds()
    for seed in range(first, first + rounds):
        changed_model(seed, tally)
        for tuner in TUNERS:
            adapted_model(tuner, seed, tally)
        if tally.wrong or time.monotonic() > until:
            break
    print(f"\nmodels that change: {tally} (hits by adapter: {dict(tally.hits_of)})")
    assert not tally.wrong, tally.wrong[0]
    assert tally.hits > 0.1 * tally.answers
