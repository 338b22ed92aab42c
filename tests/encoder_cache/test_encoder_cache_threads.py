"""Threads on `get_or_compute`: one encoder run per distinct picture, the budget kept, nobody left waiting."""

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


def test_budget_is_never_exceeded_under_load():
    cache = VisualKVCache(max_entries=8, max_vram_bytes=1000, policy="cost")
    view = cache.view("e", "p")
    over, done = [], threading.Event()

    def watch():
        while not done.is_set():
            stats = cache.stats()
            if stats.bytes > 1000 or stats.entries > 8:
                over.append(stats)

    def worker(seed):
        chance = random.Random(seed)
        for _ in range(300):
            name = chance.randrange(40)
            size = 1 + name
            assert view.get_or_compute(str(name), "image", lambda size=size: np.zeros((size, 1))).shape == (size, 1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run_all([lambda seed=seed: worker(seed) for seed in range(8)])
    done.set()
    watcher.join()
    assert not over
    assert cache.stats().evictions


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


def test_waiting_callers_are_counted_while_they_wait():
    view = VisualKVCache().view("e", "p")
    release = threading.Event()

    def compute():
        release.wait()
        return np.ones((1, 1))

    def look():
        while view.stats().waiting_callers < 2:
            time.sleep(0.001)
        release.set()

    run_all([lambda: view.get_or_compute("h", "image", compute)] * 3 + [look])
    assert view.stats().waiting_callers == 0
    assert view.stats().coalesced == 2


def test_what_was_being_encoded_during_a_clear_is_delivered_but_not_kept():
    cache = VisualKVCache()
    view = cache.view("e", "p")

    def compute():
        cache.clear()
        return np.ones((1, 1))

    assert view.get_or_compute("h", "image", compute) is not None
    assert view.lookup("h") is None


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


def test_two_callers_with_keys_in_common_do_not_wait_for_each_other_forever():
    view = VisualKVCache(max_entries=1000).view("e", "p")
    encoded, lock = Counter(), threading.Lock()

    def worker(seed):
        chance = random.Random(seed)
        for _ in range(30):
            names = [str(name) for name in chance.sample(range(60), 12)]

            def compute(indices, names=names):
                with lock:
                    encoded.update(names[index] for index in indices)
                time.sleep(0.0005)
                return [np.full((1, 1), int(names[index])) for index in indices]

            got = view.get_or_compute_many(names, "video", compute)
            assert [str(item[0, 0]) for item in got] == names

    run_all([lambda seed=seed: worker(seed) for seed in range(8)])
    assert set(encoded.values()) == {1}
