"""What one tenant purges, and what of it expires, changes nothing that another sees: contents, figures, or the work of a request."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv import open_store
from dejakv.store.budgets import now
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
