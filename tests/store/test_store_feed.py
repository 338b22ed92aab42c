"""Machines with a feed on one bucket: what one stores and removes the others know at once, and whatever happens to the feed."""

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
from research.many_machines.proxy import CALM, Faults, Proxy
from tests.services import ValkeyServer, wait_until

from dejakv.engines.vllm.settings import EncoderSettings
from dejakv.errors import ConfigError, StoreError
from dejakv.store import Store, open_store
from dejakv.store.base import (
    KV,
    NUMPY_DTYPES,
    OFFLOAD_CHUNK,
    RawTensor,
    StateInfo,
    StoredState,
    encode_meta,
)
from dejakv.store.prefix_keys import PrefixKeys, ends_of
from dejakv.store.remote import feed, health, replicas
from dejakv.store.remote.bucket import BucketObjects
from dejakv.store.remote.health import FAILURES
from dejakv.store.segment import encode, read_description
from dejakv.store.selection import Selection
from dejakv.testing.stored_states import PREAMBLE, check_whole, ids, make_prompt_state

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


def knows(store: Store, *stored_states: object) -> bool:
    return ids(store) == {stored_state.meta.id for stored_state in stored_states}  # type: ignore[attr-defined]


def test_what_one_stores_and_removes_the_others_know(bucket: str, valkey_server: ValkeyServer) -> None:
    first, second = make_prompt_state(LONG), make_prompt_state((*LONG, 1))
    with machines(bucket, valkey_server.url) as (one, other):
        came: list[str] = []
        left: list[str] = []
        other.listen(arrived=came.append)
        other.listen(removed=left.append)
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
    stored_states = [make_prompt_state((*LONG, number)) for number in range(4)]
    with machines(bucket, server.url) as (one, other):
        assert one.put(stored_states[0])
        wait_until(lambda: knows(other, stored_states[0]), "the first prompt")
        server.stop()
        assert one.put(stored_states[1])
        check_whole(one, stored_states[:2])
        check_whole(other, stored_states[:1])
        assert one.delete(stored_states[0].meta.id)
        server.start()
        wait_until(lambda: knows(other, stored_states[1]), "what happened meanwhile")
        assert other.put(stored_states[2])
        wait_until(lambda: knows(one, *stored_states[1:3]), "what happens now")


def test_a_gap_in_the_stream_is_filled_by_a_listing(
    bucket: str, valkey_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream holds a few events, and one machine sleeps while more are told."""
    monkeypatch.setattr(feed, "_STREAM_EVENTS", 2)
    stored_states = [make_prompt_state((*LONG, number)) for number in range(3)]
    with closing(open_store(bucket, feed=valkey_server.url, background=False)) as sleeper:
        told = sleeper._feed
        assert told is not None
        with closing(open_store(bucket, feed=valkey_server.url)) as one:
            assert one.put(stored_states[0])
            heard = told.receive()
            assert heard is not None
            assert len(heard[0]) > 0
            for stored_state in stored_states[1:]:
                assert one.put(stored_state)
            told._client.xtrim(told._stream, maxlen=1, approximate=False)
        assert told.receive() is None
        assert sleeper.catch_up()
        check_whole(sleeper, stored_states)
        assert told.receive() == ({}, set(), [])


def test_more_than_can_be_kept_until_the_return_is_listed(
    bucket: str, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_UNSENT", 3)
    stored_states = [make_prompt_state((*LONG, number)) for number in range(3)]
    with machines(bucket, server.url) as (one, other):
        server.stop()
        for stored_state in stored_states:
            assert one.put(stored_state)
        server.start()
        wait_until(lambda: knows(other, *stored_states), "all of them")


def test_nobody_waits_again_and_again_for_a_feed_that_does_not_answer(
    bucket: str, valkey_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was stored meanwhile is told after its return."""
    monkeypatch.setattr(health, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 3600.0)
    stored_states = [make_prompt_state((*LONG, number)) for number in range(4)]
    with closing(Proxy(int(valkey_server.url[:-2].rpartition(":")[2]))) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with closing(open_store(bucket, feed=url, background=False)) as one:
            told = one._feed
            assert told is not None
            proxy.faults = Faults(lost=1.0)
            for stored_state in stored_states:
                assert one.put(stored_state)
            assert one.delete(stored_states[0].meta.id)
            assert proxy.done["lost"] == FAILURES
            assert one.stats().feed_away_seconds > 0
            proxy.faults = CALM
            with closing(open_store(bucket, feed=valkey_server.url)) as other:
                assert knows(other, *stored_states[1:])
                assert one.put(stored_states[0])
                told.receive()
                told.publish(feed.USED, ())
                wait_until(lambda: knows(other, *stored_states), "the news")
            assert one.stats().feed_away_seconds == 0


def test_nobody_removes_what_another_removed(bucket: str, valkey_server: ValkeyServer) -> None:
    """Machines would tell each other of one removal for ever."""
    stored_state = make_prompt_state(LONG)
    with machines(bucket, valkey_server.url) as (one, other):
        assert one.put(stored_state)
        wait_until(lambda: knows(other, stored_state), "the prompt")
        assert one.purge(Selection()).prompts == 1
        wait_until(lambda: knows(other), "the purge")
        wait_until(lambda: not other._catalog.objects_to_delete(), "the removal of its copies")
        told = one._feed
        assert told is not None
        events = [event for _, event in told._client.xrange(told._stream)]
    removed = [event["name"] for event in events if event["what"] == "removed"]
    assert len(removed) == len(set(removed)) == 3, "two segments and a description"


def test_news_costs_no_look_at_everything_else(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with millions of segments hears of a thousand others in a second."""
    many = [make_prompt_state((*PREAMBLE, number, *range(20))) for number in range(40)]
    with (
        closing(open_store(bucket, background=False)) as one,
        closing(open_store(bucket, background=False)) as other,
    ):
        for stored_state in many[1:]:
            assert one.put(stored_state)
        assert other.catch_up()
        before = set(other._objects.list())
        assert one.put(many[0])
        told, rows = set(other._objects.list()) - before, list[int]()
        read = other._catalog.read

        def counted(query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            rows.append(len(found := read(query, values)))
            return found

        monkeypatch.setattr(other._catalog, "read", counted)
        assert other.catch_up((dict.fromkeys(told), set()))
        assert sum(rows) < 10
        check_whole(other, many)


@pytest.mark.parametrize("state_comes", ["told", "listed"])
def test_a_description_that_came_before_its_state_is_known_with_it(state_comes: str, bucket: str) -> None:
    stored_state = make_prompt_state(LONG)
    with (
        closing(open_store(bucket, background=False)) as one,
        closing(open_store(bucket, background=False)) as other,
    ):
        assert one.put(stored_state)
        names = {name: one._objects.head(name, 1 << 14)[0] for name in one._objects.list()}
        described = {name for name, head in names.items() if b'"kind":"record"' in head}
        assert len(described) == 1
        assert other.catch_up((dict.fromkeys(described), set()))
        assert other.meta(stored_state.meta.id) is None
        assert other.catch_up((dict.fromkeys(names.keys() - described), set()) if state_comes == "told" else None)
        check_whole(other, [stored_state])


def test_a_listing_that_takes_long_comes_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a price: of ten million objects ten thousand requests."""
    now, took, ended = [0.0], 500.0, threading.Event()
    listings: list[float] = []

    class Silent:
        def receive(self) -> feed.FeedNews:
            now[0] += 50.0
            if now[0] > 100_000:
                ended.wait()
            return {}, set(), []

        def publish(self, what: str, names: object) -> None: ...

    def listed(news: object) -> None:
        listings.append(now[0])
        now[0] += took

    monkeypatch.setattr(replicas, "FEED_SECONDS", 300.0)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now[0]))
    follower = replicas.ReplicaFollower(listed, lambda used: [], Silent())  # type: ignore[arg-type]
    try:
        while now[0] <= 100_000:
            ended.wait(0.01)
    finally:
        ended.set()
        follower.close()
    assert 2 <= len(listings) <= 1 + 100_000 / (0.8 * replicas.SHARE * took)


def test_machines_whose_feed_is_back_do_not_list_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a random part of 20 listings' time, at most ten seconds: here for none of it."""
    now, ended, drawn = [0.0], threading.Event(), list[float]()

    class Gaps:
        def receive(self) -> None: ...

        def publish(self, what: str, names: object) -> None: ...

    def listed(news: object) -> None:
        now[0] += 0.1 * 10 ** len(drawn)
        if len(drawn) > 4:
            ended.set()

    def uniform(least: float, most: float) -> float:
        drawn.append(most)
        return least

    monkeypatch.setattr(replicas, "LIST_SECONDS", 10.0)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(replicas, "random", SimpleNamespace(uniform=uniform))
    follower = replicas.ReplicaFollower(listed, lambda used: [], Gaps())  # type: ignore[arg-type]
    assert ended.wait(60)
    follower.close()
    assert drawn[:5] == [0.0, 1.2, 10.0, 1.2, 10.0]


def test_what_is_wrong_with_a_feed_is_told_at_the_start(bucket: str) -> None:
    """No server, no or another password, no right to write, no such database."""
    server = ValkeyServer("--requirepass", "secret")
    server.start()
    here = server.url.removeprefix("redis://")
    try:
        with closing(redis.Redis.from_url(f"redis://:secret@{here}")) as client:
            client.acl_setuser("reader", enabled=True, passwords="+secret", keys="*", categories=["+@read"])
        for url, said in {
            "redis://127.0.0.1:1/0": "see that Redis or Valkey answers there",
            "redis://127.0.0.1:port/0": "see that Redis or Valkey answers there",
            f"redis://{here}": "give a user who may read and write there",
            f"redis://:guessed@{here}": "give a user who may read and write there",
            f"redis://reader:secret@{here}": "give a user who may read and write there",
            f"redis://:secret@{here[:-1]}99": "give a database that the server has",
        }.items():
            with pytest.raises(StoreError, match=f"cannot be used.*: {said}.*, or leave the feed out$") as found:
                open_store(bucket, feed=url)
            assert "secret" not in str(found.value)
        open_store(bucket, feed=f"redis://:secret@{here}").close()
    finally:
        server.stop()


def test_a_feed_that_is_too_old_is_told_at_the_start(bucket: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as old, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            with old.accept()[0] as caller:
                while caller.recv(4096):
                    caller.sendall(b"-ERR unknown command 'HELLO'\r\n")

        threads.submit(serve)
        with pytest.raises(StoreError, match="use Redis 6 or newer, or Valkey, or leave"):
            open_store(bucket, feed=f"redis://127.0.0.1:{old.getsockname()[1]}/0")


def test_what_one_uses_the_others_keep(bucket: str, valkey_server: ValkeyServer) -> None:
    """Of a whole prompt and of a prefix: the least recently used by anybody leaves first."""
    first, second, third = (make_prompt_state(range(number, number + 100)) for number in (0, 1000, 2000))

    def last_used(store: Store) -> list[str]:
        return [id for (id,) in store._catalog.read("SELECT id FROM records ORDER BY used")]

    with (
        closing(open_store(bucket, feed=valkey_server.url, max_entries=2)) as one,
        closing(open_store(bucket, feed=valkey_server.url, max_entries=2)) as other,
    ):
        for stored_state in (first, second):
            assert one.put(stored_state)
        wait_until(lambda: last_used(other) == [first.meta.id, second.meta.id], "both")
        assert one.get(first.meta.id) is not None
        wait_until(lambda: last_used(other) == [second.meta.id, first.meta.id], "the use")
        assert other.put(third)
        check_whole(other, [first, third])
        wait_until(lambda: knows(one, first, third), "the eviction")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests to the bucket, of all machines."""
    counted = Counter[str]()

    def count(name: str) -> None:
        real = getattr(BucketObjects, name)

        def counting(self: BucketObjects, *given: Any) -> Any:
            counted[name] += 1
            return real(self, *given)

        monkeypatch.setattr(BucketObjects, name, counting)

    for name in ("list", "head", "get"):
        count(name)
    return counted


def test_many_machines_that_start_at_once_read_each_object_once(
    bucket: str, valkey_server: ValkeyServer, asked: Counter[str]
) -> None:
    """And nothing of what is stored afterwards: its headers are in the feed."""
    machines, stored_states = 8, [make_prompt_state((*PREAMBLE, number, *range(40))) for number in range(5)]
    with closing(open_store(bucket)) as one:
        for stored_state in stored_states:
            assert one.put(stored_state)
        objects = len(list(one._objects.list()))
    asked.clear()
    ready = threading.Barrier(machines)

    def started(_: int) -> Store:
        ready.wait()
        return open_store(bucket, feed=valkey_server.url)

    with ThreadPoolExecutor(machines) as threads, ExitStack() as stack:
        stores = [stack.enter_context(closing(store)) for store in threads.map(started, range(machines))]
        assert asked == {"list": 2 * machines, "head": objects * machines}
        for store in stores:
            check_whole(store, stored_states)
        assert asked["get"] <= objects * machines
        late = make_prompt_state(LONG)
        assert stores[0].put(late)
        for store in stores:
            wait_until(lambda store=store: knows(store, *stored_states, late), "the prompt")
        assert asked["head"] <= objects * machines + 3, "who puts looks whether its three objects are there"
        check_whole(stores[-1], [*stored_states, late])


@pytest.mark.parametrize("leaves", ["deleted", "purged", "expired"])
def test_headers_leave_with_their_objects(leaves: str, bucket: str, server: ValkeyServer) -> None:
    """The stream holds names alone, as of DejaKV 0.1; headers expire by themselves, too."""
    now = [1000.0]
    client: Any = redis.Redis.from_url(server.url)
    with (
        closing(client),
        closing(open_store(bucket, feed=server.url, background=False, clock=lambda: now[0])) as one,
    ):
        gone, kept = make_prompt_state(LONG, created=0.0, ttl=60.0), make_prompt_state(LONG, partition="q")
        for stored_state in (gone, kept):
            assert one.put(stored_state)
        (stream,) = (key for key in client.scan_iter() if client.type(key) == b"stream")
        headers = set(client.scan_iter()) - {stream}
        assert len(headers) == 2 * 3, "two segments and a description"
        assert all(0 < client.ttl(key) <= feed.HEADER_SECONDS for key in headers)
        if leaves == "deleted":
            assert one.delete(gone.meta.id)
        elif leaves == "purged":
            assert one.purge(Selection(partition="p")).prompts == 1
        else:
            now[0] += 100.0
            assert one.sweep() == 1
        assert len(set(client.scan_iter()) - {stream}) == 3
        fields = {field for _, event in client.xrange(stream) for field in event}
        assert fields == {b"by", b"what", b"name"}


@pytest.mark.parametrize("header", ["none", "too large", "cut", "another's", "no header"])
def test_a_header_that_is_not_the_object_s_is_read_from_the_bucket(
    header: str, bucket: str, server: ValkeyServer, asked: Counter[str]
) -> None:
    """In one request each. None of it comes from machines with DejaKV 0.1."""
    stored_state = make_prompt_state(
        LONG, answer=random.Random(0).randbytes(40_000).hex() if header == "too large" else None
    )
    client: Any = redis.Redis.from_url(server.url)
    with (
        closing(client),
        closing(open_store(bucket, feed=server.url, background=False)) as one,
        closing(open_store(bucket, feed=server.url, background=False)) as other,
    ):
        assert one.put(stored_state)
        keys = sorted(key for key in client.scan_iter() if client.type(key) == b"string")
        values = client.mget(keys) if keys else []
        wrong = {
            "cut": [value[:-20] for value in values],
            "another's": [*values[1:], *values[:1]],
            "no header": [b"x"] * len(values),
        }
        if header == "none":
            client.delete(*keys)
        if header in wrong:
            client.mset(dict(zip(keys, wrong[header], strict=True)))
        told = other._feed
        assert told is not None
        heard = told.receive()
        assert heard is not None
        asked.clear()
        assert other.catch_up(heard[:2])
        assert asked["head"] == (1 if header == "too large" else 3)
        assert other.stats().corrupt == (3 if header in wrong else 0)
        check_whole(other, [stored_state])
        check_whole(one, [stored_state])


def test_a_forged_header_is_no_state(bucket: str, server: ValkeyServer) -> None:
    """It says of one tenant's object that it is another's: nothing of it is served."""
    mine, theirs = make_prompt_state(LONG), make_prompt_state(LONG, partition="q")
    with (
        closing(open_store(bucket, feed=server.url, background=False)) as one,
        closing(open_store(bucket, feed=server.url, background=False)) as other,
    ):
        assert one.put(mine)
        headers = {name: one._objects.head(name, 1 << 14) for name in one._objects.list()}
        forged: feed.Put = {}
        for name, (head, size) in headers.items():
            segment, dtype, shape, _ = read_description(lambda _, told=(head, size): told)
            if segment.kind == KV:
                keys = PrefixKeys("q", "e", LONG)
                ends = ends_of(segment.start, segment.stop, ())
                claimed = replace(
                    segment,
                    partition="q",
                    prefix=keys.prefix_key(segment.start),
                    keys=tuple(map(keys.prefix_key, ends)),
                )
                made, buffers = encode(claimed, RawTensor(np.zeros(shape, NUMPY_DTYPES[dtype]), dtype))
                forged[name] = bytes(buffers[0]), made.nbytes
        assert other.catch_up((forged, set()))
        hit = other.find("q", "e", LONG, whole=True)
        assert hit is not None
        assert other.get(hit[0].donor) is None
        assert other.stats().corrupt > 0
        assert other.put(theirs)
        check_whole(other, [theirs])


def test_a_forged_header_of_a_named_tensor_is_no_state(bucket: str, server: ValkeyServer) -> None:
    """It says of an object that it is another one of the same tenant."""
    meta = StateInfo("mine", "p", "e", (), "", "", kind=OFFLOAD_CHUNK)
    tensor = RawTensor(np.ones(4096, np.uint8), "U8")
    with (
        closing(open_store(bucket, feed=server.url, background=False)) as one,
        closing(open_store(bucket, feed=server.url, background=False)) as other,
    ):
        assert one.put(StoredState(meta, tensor))
        [name] = one._objects.list()
        segment = read_description(lambda _: one._objects.head(name, 1 << 14))[0]
        about = encode_meta(replace(meta, id="other"))
        claimed, buffers = encode(replace(segment, entry_id="other", about=about), tensor)
        assert other.catch_up(({name: (bytes(buffers[0]), claimed.nbytes)}, set()))
        assert other.meta("other") is not None
        assert other.get("other") is None
        assert other.stats().corrupt == 1


def test_an_encoder_s_output_is_found_by_another_machine(bucket: str, valkey_server: ValkeyServer) -> None:
    settings = EncoderSettings(store=bucket, feed=valkey_server.url)
    with settings.open() as one, settings.open() as other:
        one.view("an encoder").store("ab" * 32, "image", np.ones((4, 8), np.float32))
        wait_until(lambda: other.view("an encoder").lookup("ab" * 32) is not None, "the output")
    with pytest.raises(
        ConfigError, match=r"feed='redis://.*' is of a bucket, and store='folder' is none: leave it out"
    ):
        EncoderSettings(store="folder", feed=valkey_server.url)


def test_an_absent_feed_is_in_the_figures(bucket: str, server: ValkeyServer) -> None:
    with closing(open_store(bucket, feed=server.url)) as one:
        assert one.stats().feed_away_seconds == 0
        server.stop()
        wait_until(lambda: one.stats().feed_away_seconds > 0, "its absence")
        server.start()
        wait_until(lambda: one.stats().feed_away_seconds == 0, "its return")
