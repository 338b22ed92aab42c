"""A model that changes while it is served, and its adapters: no answer differs from the model's own. `make soak` runs thousands of
random programs of changes."""

import random
import time

import peft
import pytest
from programs import AFTER, CHANGES, PROMPT_LEARNING, STEPS, TUNERS, Tally, adapted_model, changed_model, settings_kept
from tests.soak import deadline, soak_rounds, soak_seed
from tiny import Numbers, prompt, right, tiny

import dejakv
from dejakv.records import Record


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_use_after_a_change_is_the_changed_models(name: str) -> None:
    dice, model, records = random.Random(1), tiny(), list[Record]()
    with settings_kept():
        if name in AFTER:
            CHANGES[AFTER[name]](model, dice)
        with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
            for change in (None, CHANGES[name]):
                if change is not None:
                    change(model, dice)
                for ids in [prompt(20, 0), prompt(14, 1)] * 2:
                    assert right(model, ids)
                    cache.flush()
    hits = [record.method == "exact" for record in records[:4]]
    assert hits == [False, False, True, True] or name in AFTER


@pytest.mark.parametrize("name", STEPS)
def test_the_next_use_after_a_change_of_an_adapter_is_the_changed_models(name: str) -> None:
    dice, records = random.Random(1), list[Record]()
    with settings_kept():
        model = peft.get_peft_model(tiny(), TUNERS["lora"]()).eval()
        if name in ("unmerge", "on"):
            STEPS["merge" if name == "unmerge" else "off"](model, dice)
        with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
            for change in (None, STEPS[name]):
                if change is not None:
                    change(model, dice)
                    model.eval()
                for _ in range(2):
                    assert right(model, prompt(20, 0))
                    cache.flush()
    methods = [record.method for record in records]
    assert methods == ["none", "exact"] * 2 or name == "first"


def test_no_answer_of_a_model_that_changes_is_another_than_its_own() -> None:
    tally = Tally()
    for seed in range(soak_seed(), soak_seed() + 2):
        changed_model(seed, tally)
    assert not tally.wrong, tally.wrong[0]
    assert tally.answers == 2 * 36


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
