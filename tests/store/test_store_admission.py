"""What is let in, and that refusals are counted by reason and partition."""

import pytest

from dejakv.errors import ConfigError
from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.memory import MemoryStore
from dejakv.testing.chunks import make_chunk


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_prompts_are_refused() -> None:
    store = AdmittingStore(MemoryStore(), Admission(min_tokens=18))
    assert store.put(make_chunk(1)) is False
    assert store.stats("p").refused == {"too_short": 1}
    assert store.stats("q").refused == {}
    assert AdmittingStore(MemoryStore(), Admission(min_tokens=17)).put(make_chunk(1))


def test_second_sight_remembers_a_bounded_number() -> None:
    store = AdmittingStore(MemoryStore(), Admission(second_sight=True, remembered=2))
    assert [store.put(make_chunk(1)), store.put(make_chunk(1))] == [False, True]
    assert not any(store.put(make_chunk(number)) for number in (2, 3, 4))
    assert store.put(make_chunk(2)) is False
    assert store.put(make_chunk(4)) is True
    assert store.stats().refused == {"first_sight": 5}


def test_asking_first_counts_as_the_first_sight() -> None:
    store = AdmittingStore(MemoryStore(), Admission(second_sight=True))
    id = make_chunk(1).meta.id
    assert store.wants(id, 17, "p") is False
    assert store.wants(id, 17, "p") is True
    assert store.put(make_chunk(1)) is True
    assert store.stats("p").refused == {"first_sight": 1}
    assert store.stats("q").refused == {}


def test_the_rate_holds_on_average_and_large_chunks_pass() -> None:
    clock = Clock()
    store = AdmittingStore(MemoryStore(), Admission(max_write_rate=1000), clock)
    chunk = make_chunk(1, nbytes=4000)
    assert chunk.tensor.nbytes == 4000
    assert store.put(chunk) is True
    clock.now += 2.9
    assert store.put(make_chunk(2, nbytes=100)) is False
    clock.now += 0.2
    assert store.put(make_chunk(2, nbytes=100)) is True
    assert store.stats("p").refused == {"rate": 1}
    written = 0
    for step in range(1000):
        clock.now += 0.1
        written += 480 * store.put(make_chunk(100 + step, nbytes=480))
    assert 95_000 <= written <= 101_500


def test_an_idle_hour_saves_up_one_second() -> None:
    clock = Clock()
    store = AdmittingStore(MemoryStore(), Admission(max_write_rate=1000), clock)
    clock.now += 3600
    passed = [store.put(make_chunk(number, nbytes=480)) for number in range(10)]
    assert sum(passed) == 3


def test_wrong_rules_say_what_is_right() -> None:
    for wrong in ({"min_tokens": -1}, {"max_write_rate": -1}, {"remembered": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Admission(**wrong)
