"""The conformance suite of expiry."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dejakv.store.age import now
from dejakv.store.store import Store
from dejakv.testing.made_store import MadeStore
from dejakv.testing.prompts import PREAMBLE, check_whole, ids, prompt_chunk, told_by

FOREVER = prompt_chunk((*PREAMBLE, *range(100, 130)), created=now())


class Ahead:
    """A clock that a test sets: so many seconds ahead of the real one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return now() + self.seconds


class ExpiryTests(MadeStore):
    """Subclass it with a `make_store` that takes `clock` and `background`, as `open_store` does."""

    @pytest.fixture
    def clock(self) -> Ahead:
        return Ahead()

    @pytest.fixture
    def expiring(self, tmp_path: Path, clock: Ahead) -> Iterator[Store]:
        store = self.make_store(tmp_path / "expiring", clock=clock, background=False)
        yield store
        store.close()

    def test_an_expired_entry_is_found_by_no_call(self, expiring: Store, clock: Ahead) -> None:
        brief = prompt_chunk((*PREAMBLE, *range(200, 230)), created=now(), ttl=60.0)
        for chunk in (brief, FOREVER):
            assert expiring.put(chunk)
        check_whole(expiring, [brief, FOREVER])
        clock.seconds = 61
        assert expiring.get(brief.meta.id) is None
        assert expiring.get_parts(brief.meta.id, [(0, 4)]) is None
        assert expiring.meta(brief.meta.id) is None
        assert ids(expiring) == {FOREVER.meta.id}
        check_whole(expiring, [FOREVER])

    def test_it_leaves_with_its_parts_and_listeners_are_told(self, expiring: Store, clock: Ahead) -> None:
        told = told_by(expiring)
        brief = [prompt_chunk((*PREAMBLE, *range(first, first + 30)), created=now(), ttl=60.0) for first in (200, 300)]
        for chunk in brief:
            assert expiring.put(chunk)
        assert expiring.sweep() == 0
        clock.seconds = 61
        assert expiring.sweep() == 2
        assert (list(expiring.metas()), expiring.stats().bytes) == ([], 0)
        assert {chunk.meta.id for chunk in brief} <= set(told)

    def test_prompts_that_continue_it_stay_whole(self, expiring: Store, clock: Ahead) -> None:
        brief = prompt_chunk((*PREAMBLE, *range(200, 230)), created=now(), ttl=60.0)
        longer = prompt_chunk((*brief.meta.token_ids, *range(300, 330)), created=now())
        for chunk in (brief, longer):
            assert expiring.put(chunk)
        clock.seconds = 61
        check_whole(expiring, [longer])
        expiring.sweep()
        assert ids(expiring) == {longer.meta.id}
        check_whole(expiring, [longer])
        expiring.delete(longer.meta.id)
        assert expiring.stats().bytes == 0

    def test_a_prompt_that_is_computed_anew_lives_anew(self, expiring: Store, clock: Ahead) -> None:
        tokens = (*PREAMBLE, *range(200, 230))
        assert expiring.put(prompt_chunk(tokens, created=now(), ttl=60.0))
        clock.seconds = 61
        again = prompt_chunk(tokens, created=clock(), ttl=60.0)
        assert expiring.put(again)
        assert expiring.sweep() == 0
        check_whole(expiring, [again])
        clock.seconds = 122
        assert expiring.get(again.meta.id) is None
        assert expiring.sweep() == 1

    def test_what_another_clock_made_in_the_future_has_expired(self, expiring: Store) -> None:
        ahead = prompt_chunk((*PREAMBLE, 1), created=now() + 3600, ttl=10_000.0)
        assert expiring.put(ahead)
        assert expiring.get(ahead.meta.id) is None
        assert expiring.sweep() == 1

    def test_a_clock_that_jumps_ahead_expires_early(self, expiring: Store, clock: Ahead) -> None:
        brief = prompt_chunk((*PREAMBLE, 1), created=now(), ttl=1e6)
        assert expiring.put(brief)
        clock.seconds = 1e9
        assert expiring.get(brief.meta.id) is None

    def test_what_two_prompts_share_leaves_in_the_time_of_each(self, expiring: Store, clock: Ahead) -> None:
        """No row of the shorter-lived one outlives it, and the longer-lived one stays whole."""
        longer = prompt_chunk((*PREAMBLE, *range(200, 230)), created=now(), ttl=100.0)
        shorter = prompt_chunk(PREAMBLE, created=now(), ttl=50.0)
        assert expiring.put(longer)
        assert expiring.put(shorter)
        clock.seconds = 60
        assert ids(expiring) == {longer.meta.id}
        clock.seconds = 101
        expiring.sweep()
        assert ids(expiring) == set()

    def test_the_shorter_lived_text_does_not_stay_for_a_longer_lived_beginning(
        self, expiring: Store, clock: Ahead
    ) -> None:
        brief = prompt_chunk((*PREAMBLE, *range(200, 330)), created=now(), ttl=60.0)
        others = [prompt_chunk((*PREAMBLE, *range(200, 220), *range(n, n + 50)), created=now()) for n in (500, 600)]
        for chunk in (brief, *others):
            assert expiring.put(chunk)
        clock.seconds = 61
        hit = expiring.find("p", "e", brief.meta.token_ids)
        assert hit is not None
        assert hit[0].tokens == 60, "what it shares with prompts that are there"
        expiring.sweep()
        check_whole(expiring, others)
        row = brief.tensor.nbytes // 170
        assert sum(part.stop - part.first for part in expiring.get_parts(others[0].meta.id) or ()) == 110
        assert expiring.stats().bytes < 160 * row + 8 * 1500, "the beginning is stored once"


class PersistentExpiryTests(ExpiryTests):
    """Also: the time goes on while a store is closed."""

    def test_after_a_restart(self, tmp_path: Path, clock: Ahead) -> None:
        first = self.make_store(tmp_path / "again", clock=clock, background=False)
        brief = prompt_chunk((*PREAMBLE, 1), created=now(), ttl=60.0, vectors={"text": np.ones(3, np.float32)})
        assert first.put(brief)
        first.flush()
        first.close()
        clock.seconds = 61
        second = self.make_store(tmp_path / "again", clock=clock, background=False)
        assert list(second.metas()) == []
        assert (second.sweep(), second.stats().bytes) == (0, 0), "it left when the folder was opened"
        second.close()
