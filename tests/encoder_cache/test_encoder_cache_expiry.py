"""Encoder outputs and fusion states that may be used for a limited time."""

from pathlib import Path

import numpy as np
import pytest

from dejakv.encoder_cache import VisualKVCache
from dejakv.prototypes.fusion import FusionCache, FusionState
from dejakv.request import Retention, retention_scope
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stores import AheadClock

OUTPUT = np.ones((2, 3), np.float32)
CONTENT = "a" * 64


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AheadClock:
    clock = AheadClock()
    monkeypatch.setattr("dejakv.encoder_cache.encode_once.clock", clock)
    return clock


def store_in(folder: Path, clock: AheadClock) -> Store:
    return open_store(folder, clock=clock, background=False)


def test_an_expired_output_is_computed_again(clock: AheadClock) -> None:
    view = VisualKVCache(ttl=60).view("e", "p")
    view.get_or_compute(CONTENT, "image", lambda: OUTPUT)
    clock.seconds = 59
    view.get_or_compute(CONTENT, "image", lambda: pytest.fail("it is there"))
    clock.seconds = 61
    assert view.lookup(CONTENT) is None
    assert view.stats().entries == 0


def test_a_requests_own_time_can_only_be_shorter(clock: AheadClock) -> None:
    view = VisualKVCache(ttl=60).view("e", "p")
    for content, own in ((CONTENT, 30.0), ("b" * 64, 90.0)):
        with retention_scope(Retention(ttl=own)):
            view.store(content, "image", OUTPUT)
    clock.seconds = 31
    assert [view.lookup(content) is not None for content in (CONTENT, "b" * 64)] == [False, True]
    clock.seconds = 61
    assert view.lookup("b" * 64) is None


def test_it_leaves_the_disk_and_is_not_there_after_a_restart(clock: AheadClock, tmp_path: Path) -> None:
    first = VisualKVCache(ttl=60, disk=store_in(tmp_path, clock))
    first.view("e", "p").store(CONTENT, "image", OUTPUT)
    first.close()
    clock.seconds = 30
    again = VisualKVCache(disk=store_in(tmp_path, clock))
    assert again.view("e", "p").lookup(CONTENT) is not None
    clock.seconds = 61
    assert again.view("e", "p").lookup(CONTENT) is None  # also in memory, where it came from the disk
    again.close()
    store = store_in(tmp_path, clock)
    assert store.stats().entries == 0
    assert list(tmp_path.glob("segments/*/*")) == []
    store.close()


def test_fusion_states(clock: AheadClock, tmp_path: Path) -> None:
    store = open_store(tmp_path, clock=clock, background=False)
    cache = FusionCache(None, store, "e", "p", 60.0)
    cache.save(FusionState("chunk", {"rows": OUTPUT}))
    assert cache.load("chunk") is not None
    clock.seconds = 61
    assert cache.load("chunk") is None
    assert store.sweep() == 1
    store.close()
