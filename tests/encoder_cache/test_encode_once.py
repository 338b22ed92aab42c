"""One encoder run for each distinct picture, whoever asks, and callers that are interrupted."""

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dejakv.encoder_cache import VisualKVCache
from dejakv.errors import InputError


def run_all(targets):
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(thread.is_alive() for thread in threads), "a caller was never woken"


def test_one_run_per_distinct_picture_under_many_threads():
    cache = VisualKVCache(max_entries=64)
    view = cache.view("e", "p")
    runs, lock, wrong = Counter(), threading.Lock(), []

    def compute(name):
        with lock:
            runs[name] += 1
        time.sleep(0.0005)
        return np.full((2, 4), name, np.float32)

    def worker(seed):
        for name in random.Random(seed).choices(range(50), k=200):
            got = view.get_or_compute(str(name), "image", lambda name=name: compute(name))
            if got[0, 0] != name:
                wrong.append(name)

    run_all([lambda seed=seed: worker(seed) for seed in range(16)])
    assert not wrong
    assert set(runs.values()) == {1}
    stats = cache.stats()
    assert stats.encoder_runs == len(runs) == stats.misses
    assert stats.hits + stats.misses == 16 * 200
    assert stats.waiting_callers == 0


def test_an_encoder_error_goes_to_everyone_who_waited_and_is_not_kept():
    view = VisualKVCache().view("e", "p")
    release, runs, errors = threading.Event(), [], []

    def broken():
        runs.append(1)
        release.wait()
        raise MemoryError("no VRAM left")

    def caller():
        with pytest.raises(MemoryError, match="no VRAM") as caught:
            view.get_or_compute("h", "image", broken)
        errors.append(caught.value)

    def open_when_all_wait():
        while view.stats().waiting_callers < 4:
            time.sleep(0.001)
        release.set()

    run_all([caller] * 5 + [open_when_all_wait])
    assert len(runs) == 1
    assert len(errors) == 5
    stats = view.stats()
    assert (stats.encoder_failures, stats.encoder_runs, stats.entries) == (1, 0, 0)
    assert stats.hits == 0
    assert view.get_or_compute("h", "image", lambda: np.ones((1, 1))) is not None


def test_an_interrupted_leader_is_replaced_by_one_who_waits():
    view = VisualKVCache().view("e", "p")
    release, runs, got = threading.Event(), [], []

    def compute():
        runs.append(1)
        if len(runs) == 1:
            release.wait()
            raise KeyboardInterrupt
        return np.ones((1, 1))

    def leader():
        with pytest.raises(KeyboardInterrupt):
            view.get_or_compute("h", "image", compute)

    def follower():
        while not runs:
            time.sleep(0.001)
        got.append(view.get_or_compute("h", "image", compute))

    def interrupt():
        while view.stats().waiting_callers < 3:
            time.sleep(0.001)
        release.set()

    run_all([leader, follower, follower, follower, interrupt])
    assert len(runs) == 2
    assert len(got) == 3
    assert view.stats().waiting_callers == 0


def test_an_encoder_that_asks_for_its_own_output_is_told_so():
    view = VisualKVCache().view("e", "p")

    def compute():
        return view.get_or_compute("h", "image", compute)

    with pytest.raises(InputError, match="wait for itself"):
        view.get_or_compute("h", "image", compute)
    assert view.get_or_compute("h", "image", lambda: np.ones((1, 1))) is not None


def test_an_encoder_may_ask_for_another_output():
    view = VisualKVCache().view("e", "p")
    outer = view.get_or_compute(
        "clip", "video", lambda: view.get_or_compute("frame", "image", lambda: np.ones((1, 1))) * 2
    )
    assert outer[0, 0] == 2
