"""Engines on one bucket: what one computed another loads, and not where that takes longer than computing."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from tests.services import ValkeyServer, wait_until
from toy_engine import ToyEngine, answer
from vllm_harness import tokens

from dejakv.decide.costs import RunningMedian
from dejakv.engines.base import LATE
from dejakv.engines.vllm.lookups import RowPace
from dejakv.engines.vllm.scheduler import FAR
from dejakv.store.open import open_store
from dejakv.store.remote import replicas
from dejakv.store.remote.bucket import BucketObjects
from dejakv.store.remote.health import LinkTiming
from dejakv.store.selection import Selection

Start = Callable[..., ToyEngine]
PROMPT = tokens(150, 31)


def test_a_load_from_a_bucket_has_a_deadline(toy: Start, bucket: str, monkeypatch: Any) -> None:
    """The time in which the tokens are computed; a read that is known to take longer is not begun."""
    one = toy({"store": bucket})
    first = one.ask(PROMPT)
    one.settle()
    go, real, asked = threading.Event(), BucketObjects.get, list[str]()

    def slow(self: BucketObjects, name: str) -> Any:
        asked.append(name)
        assert go.wait(60)
        return real(self, name)

    monkeypatch.setattr(BucketObjects, "get", slow)
    two = toy({"store": bucket, "memory_bytes": 0})
    truth = answer(PROMPT, 1, two.weight)
    lookups = two.scheduler.connector.scheduler_side.lookups
    store, lookups.pace = lookups.cache.store, RowPace(_row_rate=RunningMedian(1e-4))
    late = two.ask(PROMPT, no_store=True)
    assert (late.told["method"], late.told["reason"], late.tokens) == ("none", LATE, truth)
    while not store.stats().late:  # counted by the thread that read
        time.sleep(0.01)
    assert store.stats().late == 1
    known = len(asked)
    store._remote._link.read(1, 10, 3600.0)
    two.forget()
    refused = two.ask(PROMPT, no_store=True)
    assert (refused.told["method"], refused.told["reason"], refused.tokens) == ("none", FAR, truth)
    assert len(asked) == known > 0
    store._remote._link = LinkTiming()
    lookups.pace = RowPace(_row_rate=RunningMedian(1.0))
    go.set()
    two.forget()
    hit = two.ask(PROMPT, no_store=True)
    assert (hit.told["method"], hit.tokens, first.tokens) == ("exact", truth, truth)


def test_a_feed_tells_and_hears_at_once(toy: Start, bucket: str, valkey_server: ValkeyServer, monkeypatch: Any) -> None:
    """Before any listing; also where the index is in memory, and state is packed on its way."""
    monkeypatch.setattr(replicas, "LIST_SECONDS", 3600.0)
    monkeypatch.setattr(replicas, "FEED_SECONDS", 3600.0)
    with closing(open_store(bucket, feed=valkey_server.url)) as other:
        engine = toy({"store": bucket, "feed": valkey_server.url, "memory_bytes": 0, "compress": True})
        truth = engine.ask(PROMPT).tokens
        assert truth == answer(PROMPT, 1, engine.weight)
        engine.settle()
        wait_until(lambda: other.stats().entries > 0, "the prompt of the engine")
        assert other.purge(Selection()).prompts > 0
        store = engine.scheduler.connector.scheduler_side.lookups.cache.store
        wait_until(lambda: store.stats().entries == 0, "the purge")
        engine.forget()
        again = engine.ask(PROMPT, no_store=True)
        assert (again.told["method"], again.tokens) == ("none", truth)
