"""Machines with a feed on one bucket: what one stores and removes the others know at once, and whatever happens to the feed."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.services import ValkeyServer, wait_until

from dejakv.errors import StoreError
from dejakv.store import Store, open_store
from dejakv.store.remote import feed, replicas
from dejakv.store.selection import Selection
from dejakv.testing.chunks import PREAMBLE, check_whole, ids, prompt_chunk

pytestmark = pytest.mark.slow  # with real services

LONG = (*PREAMBLE, *range(300))


@pytest.fixture(autouse=True)
def no_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found in time is not found by a listing that would have come anyway."""
    monkeypatch.setattr(replicas, "LIST_SECONDS", 3600.0)
    monkeypatch.setattr(replicas, "FEED_SECONDS", 3600.0)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.stop()


@contextmanager
def machines(bucket: str, url: str) -> Iterator[tuple[Store, Store]]:
    with closing(open_store(bucket, feed=url)) as one, closing(open_store(bucket, feed=url)) as other:
        yield one, other


def knows(store: Store, *chunks: object) -> bool:
    return ids(store) == {chunk.meta.id for chunk in chunks}  # type: ignore[attr-defined]


def test_what_one_stores_and_removes_the_others_know(bucket: str, valkey_server: ValkeyServer) -> None:
    first, second = prompt_chunk(LONG), prompt_chunk((*LONG, 1))
    with machines(bucket, valkey_server.url) as (one, other):
        came: list[str] = []
        left: list[str] = []
        other.on_arrival(came.append)
        other.on_evict(left.append)
        assert one.put(first)
        wait_until(lambda: knows(other, first), "the prompt of the other")
        check_whole(other, [first])
        wait_until(lambda: came == [first.meta.id], "the news of it")
        assert other.put(second)
        wait_until(lambda: knows(one, first, second), "the answer")
        assert one.delete(first.meta.id)
        wait_until(lambda: knows(other, second), "the removal")
        wait_until(lambda: left == [first.meta.id], "the news of the removal")
        check_whole(other, [second])
        assert one.purge(Selection()).prompts == 1
        wait_until(lambda: knows(other), "the purge")
        wait_until(lambda: other.stats().bytes == 0, "the end of all state")


def test_what_was_told_while_the_feed_was_away_is_known_after_its_return(bucket: str, server: ValkeyServer) -> None:
    """The server comes back without what it held."""
    chunks = [prompt_chunk((*LONG, number)) for number in range(4)]
    with machines(bucket, server.url) as (one, other):
        assert one.put(chunks[0])
        wait_until(lambda: knows(other, chunks[0]), "the first prompt")
        server.stop()
        assert one.put(chunks[1])
        check_whole(one, chunks[:2])
        check_whole(other, chunks[:1])
        assert one.delete(chunks[0].meta.id)
        server.start()
        wait_until(lambda: knows(other, chunks[1]), "what happened meanwhile")
        assert other.put(chunks[2])
        wait_until(lambda: knows(one, *chunks[1:3]), "what happens now")


def test_a_gap_in_the_stream_is_filled_by_a_listing(
    bucket: str, valkey_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream holds a few events, and one machine sleeps while more are told."""
    monkeypatch.setattr(feed, "_KEPT", 2)
    chunks = [prompt_chunk((*LONG, number)) for number in range(3)]
    with closing(open_store(bucket, feed=valkey_server.url, background=False)) as sleeper:
        told = sleeper._feed
        assert told is not None
        with closing(open_store(bucket, feed=valkey_server.url)) as one:
            assert one.put(chunks[0])
            heard = told.hear()
            assert heard is not None
            assert len(heard[0]) > 0
            for chunk in chunks[1:]:
                assert one.put(chunk)
            told._client.xtrim(told._stream, maxlen=1, approximate=False)
        assert told.hear() is None
        assert sleeper.catch_up()
        check_whole(sleeper, chunks)
        assert told.hear() == (set(), set(), [])


def test_more_than_can_be_kept_until_the_return_is_listed(
    bucket: str, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_UNSENT", 3)
    chunks = [prompt_chunk((*LONG, number)) for number in range(3)]
    with machines(bucket, server.url) as (one, other):
        server.stop()
        for chunk in chunks:
            assert one.put(chunk)
        server.start()
        wait_until(lambda: knows(other, *chunks), "all of them")


def test_nobody_removes_what_another_removed(bucket: str, valkey_server: ValkeyServer) -> None:
    """Machines would tell each other of one removal for ever."""
    chunk = prompt_chunk(LONG)
    with machines(bucket, valkey_server.url) as (one, other):
        assert one.put(chunk)
        wait_until(lambda: knows(other, chunk), "the prompt")
        assert one.purge(Selection()).prompts == 1
        wait_until(lambda: knows(other), "the purge")
        wait_until(lambda: not other._catalog.leaving(), "the removal of its copies")
        told = one._feed
        assert told is not None
        events = [event for _, event in told._client.xrange(told._stream)]
    removed = [event["name"] for event in events if event["what"] == "removed"]
    assert len(removed) == len(set(removed)) == 3, "two segments and a description"


def test_news_costs_no_look_at_everything_else(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with millions of segments hears of a thousand others in a second."""
    many = [prompt_chunk((*PREAMBLE, number, *range(20))) for number in range(40)]
    with (
        closing(open_store(bucket, background=False)) as one,
        closing(open_store(bucket, background=False)) as other,
    ):
        for chunk in many[1:]:
            assert one.put(chunk)
        assert other.catch_up()
        before = set(other._objects.list())
        assert one.put(many[0])
        told, rows = set(other._objects.list()) - before, list[int]()
        read = other._catalog.read

        def counted(query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            rows.append(len(found := read(query, values)))
            return found

        monkeypatch.setattr(other._catalog, "read", counted)
        assert other.catch_up((told, set()))
        assert sum(rows) < 10
        check_whole(other, many)


@pytest.mark.parametrize("state_comes", ["told", "listed"])
def test_a_description_that_came_before_its_state_is_known_with_it(state_comes: str, bucket: str) -> None:
    chunk = prompt_chunk(LONG)
    with (
        closing(open_store(bucket, background=False)) as one,
        closing(open_store(bucket, background=False)) as other,
    ):
        assert one.put(chunk)
        names = {name: one._objects.head(name, 1 << 14)[0] for name in one._objects.list()}
        described = {name for name, head in names.items() if b'"kind":"record"' in head}
        assert len(described) == 1
        assert other.catch_up((described, set()))
        assert other.meta(chunk.meta.id) is None
        assert other.catch_up((names.keys() - described, set()) if state_comes == "told" else None)
        check_whole(other, [chunk])


def test_a_listing_that_takes_long_comes_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a price: of ten million objects ten thousand requests."""
    now, took, ended = [0.0], 500.0, threading.Event()
    listings: list[float] = []

    class Silent:
        def hear(self) -> tuple[set[str], set[str], list[str]]:
            now[0] += 50.0
            if now[0] > 100_000:
                ended.wait()
            return set(), set(), []

        def tell(self, what: str, names: object) -> None: ...

    def listed(news: object) -> None:
        listings.append(now[0])
        now[0] += took

    monkeypatch.setattr(replicas, "FEED_SECONDS", 300.0)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now[0]))
    follower = replicas.Follower(listed, lambda used: [], Silent())  # type: ignore[arg-type]
    try:
        while now[0] <= 100_000:
            ended.wait(0.01)
    finally:
        ended.set()
        follower.close()
    assert 2 <= len(listings) <= 1 + 100_000 / (replicas.SHARE * took)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "redis://127.0.0.1:port/0"])
def test_a_feed_that_does_not_answer_is_told_at_the_start(bucket: str, url: str) -> None:
    with pytest.raises(StoreError, match=r"cannot be used.*see that Redis or Valkey answers"):
        open_store(bucket, feed=url)


def test_what_one_uses_the_others_keep(bucket: str, valkey_server: ValkeyServer) -> None:
    """Of a whole prompt and of a prefix: the least recently used by anybody leaves first."""
    first, second, third = (prompt_chunk(range(number, number + 100)) for number in (0, 1000, 2000))

    def last_used(store: Store) -> list[str]:
        return [id for (id,) in store._catalog.read("SELECT id FROM records ORDER BY used")]

    with (
        closing(open_store(bucket, feed=valkey_server.url, max_entries=2)) as one,
        closing(open_store(bucket, feed=valkey_server.url, max_entries=2)) as other,
    ):
        for chunk in (first, second):
            assert one.put(chunk)
        wait_until(lambda: last_used(other) == [first.meta.id, second.meta.id], "both")
        assert one.get(first.meta.id) is not None
        wait_until(lambda: last_used(other) == [second.meta.id, first.meta.id], "the use")
        assert other.put(third)
        check_whole(other, [first, third])
        wait_until(lambda: knows(one, first, third), "the eviction")
