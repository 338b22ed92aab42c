"""What one tenant purges, and what of it expires, changes nothing that another sees: contents, figures, or the work of a request."""

import random
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.security.tenants import cache_over
from tests.security.test_security_timing import calls_of, serve

from dejakv import open_store
from dejakv.store.age import now
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv.testing import make_chunk

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "brief", "get", "purge", "old", "donor", "sweep"]), st.integers(0, 12)),
    max_size=25,
)


def step(store: Store, partition: str, action: str, number: int) -> Any:
    chunk = make_chunk(number, partition=partition, nbytes=500 + 100 * (number % 4), created=now())
    match action:
        case "put":
            return store.put(chunk)
        case "brief":  # its time is over at once
            return store.put(make_chunk(number, partition=partition, nbytes=600, created=now() - 2, ttl=1.0))
        case "get":
            return store.get(chunk.meta.id) is not None
        case "purge":
            return store.purge(Selection(partition))
        case "old":
            return store.purge(Selection(partition, older_than=0.0))
        case "donor":
            return store.purge(Selection(partition, donors=(chunk.meta.id,)))
        case _:
            assert isinstance(store, Store)
            return store.sweep() if partition == "a" else None


def seen(own: list[Any], others: list[Any]) -> list[Any]:
    store = open_store(None, partitions=3, max_entries=12, max_bytes=24_000, quotas=["b=9000:5"])
    store._background = False  # type: ignore[attr-defined]  # what expires is removed where the steps say so
    noted: list[Any] = []
    pace = len(others) // (len(own) + 1) + 1
    for place, (action, number) in enumerate(own):
        for other, of in others[place * pace : (place + 1) * pace]:
            step(store, "a", other, of)
        noted.append((step(store, "b", action, number), sorted(meta.id for meta in store.metas("b"))))
        figures = store.stats("b")
        noted.append((figures.hits, figures.puts, figures.refused, figures.evictions.get("entries", 0)))
    return noted


@settings(deadline=None)
@given(own=STEPS, others=STEPS)
def test_what_others_purge_and_let_expire_is_not_seen(own: list[Any], others: list[Any]) -> None:
    own = [(action, number) for action, number in own if action != "brief"]
    assert seen(own, others) == seen(own, [])


def test_the_work_of_a_request_does_not_tell_of_others_purges(tmp_path: Path) -> None:
    def run(name: str, purges: bool) -> list[int]:
        rng, noted = random.Random(3), list[int]()
        cache = cache_over(open_store(tmp_path / name, partitions=2, max_entries=40), reuse="exact")
        for place in range(10):
            serve(cache, "a", (place, 1, 2))
            words = tuple(rng.sample(range(12), 3))
            if purges:
                cache.purge(Selection("a"))
                cache.store.meta("0" * 40)  # takes note of what has left
            noted.append(calls_of(partial(serve, cache, "b", words)))
        cache.close()
        return noted

    alone, among = run("alone", False), run("among", True)
    assert all(abs(one - other) / one < 0.02 for one, other in zip(alone[1:], among[1:], strict=True))
