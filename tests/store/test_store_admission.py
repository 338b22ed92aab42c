"""What is let in, and that refusals are counted by reason and partition."""

import pytest

from dejakv.errors import ConfigError
from dejakv.store import budgets, open_store
from dejakv.store.budgets import Admission, AdmissionGate
from dejakv.testing.stored_states import make_stored_state


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_prompts_are_refused() -> None:
    store = open_store(min_tokens=18)
    assert store.put(make_stored_state(1)) is False
    assert store.stats("p").refused == {"too_short": 1}
    assert store.stats("q").refused == {}
    assert open_store(min_tokens=17).put(make_stored_state(1))


def test_second_sight_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_REMEMBERED", 2)
    gate = AdmissionGate(Admission(second_sight=True))
    ids = [str(number) for number in range(5)]
    assert [gate.refusal_reason(ids[1], 20), gate.refusal_reason(ids[1], 20)] == ["first_sight", None]
    assert [gate.refusal_reason(id, 20) for id in (*ids[2:], ids[2], ids[4])] == [*["first_sight"] * 4, None]


def test_asking_first_counts_as_the_first_sight() -> None:
    store = open_store(second_sight=True)
    id = make_stored_state(1).meta.id
    assert store.admits(id, 17, "p") is False
    assert store.admits(id, 17, "p") is True
    assert store.put(make_stored_state(1)) is True
    assert store.stats("p").refused == {"first_sight": 1}
    assert store.stats("q").refused == {}


def test_the_rate_holds_on_average_and_large_states_pass() -> None:
    clock = Clock()
    gate = AdmissionGate(Admission(max_write_rate=1000), clock)
    assert gate.rate_refusal(4000) is None
    clock.now += 2.9
    assert gate.rate_refusal(100) == "rate"
    clock.now += 0.2
    assert gate.rate_refusal(100) is None
    written = 0
    for _ in range(1000):
        clock.now += 0.1
        written += 480 * (gate.rate_refusal(480) is None)
    assert 95_000 <= written <= 101_500
    clock.now += 3600
    assert sum(gate.rate_refusal(480) is None for _ in range(10)) == 3, "an idle hour saves up one second"


def test_wrong_rules_say_what_is_right() -> None:
    for wrong in ({"min_tokens": -1}, {"max_write_rate": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Admission(**wrong)
