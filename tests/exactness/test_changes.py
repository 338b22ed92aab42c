"""A model that changes while it is served, and its adapters: no answer differs from the model's own."""

import contextlib
import random
from typing import Any

import peft
import pytest
from changes import AFTER, CHANGES, STEPS, TUNERS, settings_kept
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


def test_changes_one_after_another() -> None:
    """In an order drawn anew for each model; not every change can follow every other."""
    for seed in range(2):
        dice, model = random.Random(seed), tiny(seed)
        with settings_kept(), dejakv.attach(model, Numbers()) as cache:
            for name in dice.sample(list(CHANGES), len(CHANGES)):
                with contextlib.suppress(Exception):
                    CHANGES[name](model, dice)
                for _ in range(2):
                    assert right(model, prompt(16, 0)), name
                    cache.flush()


@pytest.mark.parametrize("tuner", TUNERS)
def test_an_adapter_of_any_kind_may_come_and_change(tuner: str) -> None:
    """Attached as the base model before the adapter is there; the wrapper and the base model generate in turns."""
    dice, base = random.Random(tuner), tiny()
    with settings_kept(), dejakv.attach(base, Numbers()) as cache:
        model: Any = base
        for change in (None, "in place", dice.choice(["merge", "off", "scale"])):
            for through in (model, base):
                for _ in range(2):
                    assert right(base, prompt(16, 0), None if through is base else through)
                    cache.flush()
            if model is base:
                model = peft.get_peft_model(base, TUNERS[tuner]()).eval()
            elif change is not None:
                with contextlib.suppress(Exception):  # not every kind can be merged or scaled
                    STEPS[change](model, dice)
            model.eval()
        for through in (model, base):
            assert right(base, prompt(16, 0), None if through is base else through)
