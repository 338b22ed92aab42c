"""The conformance suite of expiry, for a store under a `DeltaStore`."""

from pathlib import Path

import numpy as np
import pytest

from dejakv.store.age import now
from dejakv.store.base import NODE, Store
from dejakv.store.deltas import DeltaStore
from dejakv.store.expiry import ExpiringStore
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
    """What `ExpiringStore` must do over every store. Subclass it with the `make_store` of the store below."""

    @pytest.fixture
    def clock(self) -> Ahead:
        return Ahead()

    @pytest.fixture
    def expiring(self, store: Store, clock: Ahead) -> ExpiringStore:
        return ExpiringStore(DeltaStore(store), clock, background=False)

    def test_an_expired_entry_is_found_by_no_call(self, expiring: ExpiringStore, clock: Ahead) -> None:
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

    def test_it_leaves_with_its_parts_and_listeners_are_told(self, expiring: ExpiringStore, clock: Ahead) -> None:
        told = told_by(expiring)
        brief = [prompt_chunk((*PREAMBLE, *range(first, first + 30)), created=now(), ttl=60.0) for first in (200, 300)]
        for chunk in brief:
            assert expiring.put(chunk)
        assert expiring.sweep() == 0
        clock.seconds = 61
        assert expiring.sweep() == 2
        below = expiring.inner.inner  # type: ignore[attr-defined]
        assert list(below.metas()) == []
        assert {chunk.meta.id for chunk in brief} <= set(told)

    def test_prompts_that_continue_it_stay_whole(self, expiring: ExpiringStore, clock: Ahead) -> None:
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
        below = expiring.inner.inner  # type: ignore[attr-defined]
        assert [meta for meta in below.metas() if meta.kind == NODE] == []

    def test_a_prompt_that_is_computed_anew_lives_anew(self, expiring: ExpiringStore, clock: Ahead) -> None:
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

    def test_what_another_clock_made_in_the_future_has_expired(self, expiring: ExpiringStore) -> None:
        ahead = prompt_chunk((*PREAMBLE, 1), created=now() + 3600, ttl=10_000.0)
        assert expiring.put(ahead)
        assert expiring.get(ahead.meta.id) is None
        assert expiring.sweep() == 1

    def test_a_clock_that_jumps_ahead_expires_early(self, expiring: ExpiringStore, clock: Ahead) -> None:
        brief = prompt_chunk((*PREAMBLE, 1), created=now(), ttl=1e6)
        assert expiring.put(brief)
        clock.seconds = 1e9
        assert expiring.get(brief.meta.id) is None

    def test_splitting_keeps_the_time_of_both(self, expiring: ExpiringStore, clock: Ahead) -> None:
        """The prompt that is split off, and the one that gives its rows, expire each in its own time."""
        longer = prompt_chunk((*PREAMBLE, *range(200, 230)), created=now(), ttl=100.0)
        shorter = prompt_chunk(PREAMBLE, created=now(), ttl=50.0)
        assert expiring.put(longer)
        assert expiring.put(shorter)
        clock.seconds = 60
        assert ids(expiring) == {longer.meta.id}
        clock.seconds = 101
        expiring.sweep()
        assert ids(expiring) == set()


class PersistentExpiryTests(ExpiryTests):
    """Also: the time goes on while a store is closed."""

    def test_after_a_restart(self, tmp_path: Path, clock: Ahead) -> None:
        first = ExpiringStore(DeltaStore(self.make_store(tmp_path / "again")), clock, background=False)
        brief = prompt_chunk((*PREAMBLE, 1), created=now(), ttl=60.0, vectors={"text": np.ones(3, np.float32)})
        assert first.put(brief)
        first.flush()
        first.close()
        clock.seconds = 61
        second = ExpiringStore(DeltaStore(self.make_store(tmp_path / "again")), clock, background=False)
        assert list(second.metas()) == []
        assert second.sweep() == 1
        second.close()
