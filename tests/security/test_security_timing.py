"""What a tenant's request takes tells nothing of what another tenant has stored.

Work is counted, not timed: function calls, of Python and of C, while the request is looked up, planned and recorded. Clocks
are asked in the long runs alone.
"""

import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import deadline, soak_seed
from tests.security.probes import cache_over, computed, prepared

from dejakv import open_store
from dejakv.cache import HierarchicalCache
from dejakv.store.selection import Selection


def calls_of(action: Callable[[], Any]) -> int:
    """Functions called inside, of Python and of C."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # or what it finalizes would be counted
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return counted


def serve(cache: HierarchicalCache, partition: str, words: tuple[int, ...]) -> None:
    asked = replace(prepared(partition, words), epoch="e")
    decision = cache.find(asked)
    for donor in decision.plan.donors:
        cache.store.get(donor.id)
    cache.keep(asked, decision, decision.exact, computed(asked, "e"))


def auc(hits: list[float], misses: list[float]) -> float:
    """How often a hit takes less than a miss; 0.5 is a coin."""
    pairs = [(hit, miss) for hit in hits for miss in misses]
    return sum((hit < miss) + 0.5 * (hit == miss) for hit, miss in pairs) / len(pairs)


def work(owner: str, rng: random.Random, trials: int) -> tuple[list[float], list[float]]:
    """Calls that b's request takes where `owner` has stored the same prompt, and where another one of the same length; each
    pair with the same history otherwise."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(trials):
        prompt = tuple(rng.sample(range(12), 4))
        other = tuple(sorted(set(range(12)) - set(prompt)))[:4]
        for stored, noted in zip((prompt, other), found, strict=True):
            cache = cache_over(open_store(), reuse="exact")
            serve(cache, "b", (0, 1, 2))
            serve(cache, owner, stored)
            noted.append(calls_of(partial(serve, cache, "b", prompt)))
    return found


def test_work_does_not_tell_what_another_tenant_has() -> None:
    hits, misses = work("a", random.Random(1), 40)
    assert hits == misses
    assert auc(hits, misses) == pytest.approx(0.5)


def test_work_tells_a_tenant_what_it_has_itself() -> None:
    """The check above can fail: within one partition the work is less where the prompt is there."""
    hits, misses = work("b", random.Random(1), 40)
    assert auc(hits, misses) > 0.95


@pytest.mark.parametrize("purges", [False, True])
def test_the_same_request_takes_the_same_work_whatever_others_store_or_purge(tmp_path: Path, purges: bool) -> None:
    """On disk too, and with a budget in parts that is full."""

    def run(number: int, others: int) -> list[int]:
        rng = random.Random(3)
        store = open_store(tmp_path / str(number), partitions=2, max_entries=16)
        cache = cache_over(store, reuse="exact")
        noted: list[int] = []
        for step in range(12):
            for extra in range(others):
                serve(cache, "a", (step % 12, extra % 12, (step * extra) % 12))
            if others and purges:
                cache.purge(Selection("a"))
                cache.store.meta("0" * 40)  # takes note of what has left
            words = tuple(rng.sample(range(12), 3))
            noted.append(calls_of(partial(serve, cache, "b", words)))
        cache.close()
        return noted[1:]  # the first tenant that stores makes a folder

    alone, among = run(0, 0), run(1, 6)
    assert all(abs(one - other) / one < 0.02 for one, other in zip(alone, among, strict=True))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_clocks_do_not_tell_either() -> None:
    rng, ends = random.Random(soak_seed()), deadline(0.05)
    cache = cache_over(open_store(), reuse="exact")
    seconds: dict[tuple[str, bool], list[float]] = {(owner, cached): [] for owner in "ab" for cached in (True, False)}
    while time.monotonic() < ends and len(seconds["a", True]) < 2000:
        for owner in "ab":
            prompt, other = (tuple(rng.randrange(12) for _ in range(12)) for _ in range(2))
            cached = rng.random() < 0.5
            serve(cache, owner, prompt if cached else other)
            asked = replace(prepared("b", prompt), epoch="e")
            began = time.perf_counter()
            cache.find(asked)
            seconds[owner, cached].append(time.perf_counter() - began)
    across, within = (auc(seconds[owner, True][-800:], seconds[owner, False][-800:]) for owner in "ab")
    print(f"AUC across partitions {across:.3f}, within one {within:.3f}")
    assert 0.42 < across < 0.58
