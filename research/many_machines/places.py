"""How soon a replica finds what another stored, and what a load from each place takes.

A load from memory, a folder and S3 is compared with a plain read of as many bytes.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np

from dejakv.identity import exact_key
from dejakv.store import Store, open_store
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.remote.bucket import BucketObjects
from research.machine import spread
from research.many_machines.proxy import Faults, Proxy
from research.many_machines.services import Services
from research.many_machines.simulation import LETTERS, texts

SHAPE = (2, 30, 3, 64)
"""Of SmolLM2: K and V, layers, heads, and numbers in each; float32."""
TOKENS = 227
"""10.5 MB."""
LONG = (10_000, 30_000)
"""Tokens of prompts whose descriptions the feed does not hold."""
AWAY_SECONDS = 0.02
"""To an answer of a bucket that is not on the same machine."""
_POLL = 0.0005
_LONGEST = 60.0
Ids = tuple[int, ...]


def prefix(number: int, tokens: int = TOKENS) -> StoredState:
    """A prompt with random state; another length has English text, and less state."""
    rng = np.random.default_rng(number)
    ids = tuple(rng.integers(0, 49_152, tokens).tolist())
    shape, text = SHAPE, ""
    if tokens != TOKENS:
        shape, text = (2, 1, 1, 8), texts()[: round(LETTERS * tokens)]
    both, layers, heads, dim = shape
    state = rng.standard_normal((both, layers, heads, tokens, dim), np.float32)
    return StoredState(
        StateInfo(exact_key("p", "e", ids, ()), "p", "e", ids, text, ""), RawTensor(state, "F32")
    )


# How soon


def found(services: Services, times: int, times_without: int) -> dict[str, Any]:
    """Measure when another process finds a prompt that was put.

    The figures are milliseconds from the return of a put of 10 MB until the other process finds the
    prompt, all of its state and its description. With the feed prompts come one after another,
    without it at random times within a listing's interval. 0 tells that a prompt was found before
    the put returned. `found_long` is of long prompts with the feed, and `found_away` where the
    bucket answers 20 ms later.
    """
    feed, few = services.valkey.url, max(1, times // 4)
    told = _found(services, times, feed, within=0.0)
    listed = _found(services, times_without, feed=None, within=12.0)
    long = {tokens: _found(services, few, feed, 0.0, tokens) for tokens in LONG}
    with closing(Proxy(urlsplit(services.s3.endpoint).port or 0)) as proxy:
        proxy.faults = Faults(delay=1.0, seconds=(AWAY_SECONDS, AWAY_SECONDS))
        with mock.patch.dict(os.environ, AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}"):
            away = {tokens: _found(services, few, feed, 0.0, tokens) for tokens in (TOKENS, *LONG)}
    return {
        "found_ms": told["p50"],
        "found": told,
        "found_by_listing": listed,
        "found_long": long,
        "found_away": away,
    }


def _found(
    services: Services, times: int, feed: str | None, within: float, tokens: int = TOKENS
) -> dict[str, float]:
    url = services.place()
    spawn = get_context("spawn")
    connection, its = spawn.Pipe()
    other = spawn.Process(target=_watch, args=(its, url, feed), daemon=True)
    other.start()
    rng, stored = random.Random(0), list[float]()
    try:
        with closing(open_store(url, feed=feed)) as store:
            connection.recv()
            waits = sorted(rng.uniform(0, within) for _ in range(times))
            stored_states = [prefix(number, tokens) for number in range(times)]
            if within:  # all are waited for at once
                connection.send([stored_state.meta.token_ids for stored_state in stored_states])
            began, ended = time.monotonic(), list[float]()
            for wait, stored_state in zip(waits, stored_states, strict=True):
                if not within:
                    connection.send([stored_state.meta.token_ids])
                    time.sleep(0.05)
                time.sleep(max(0.0, began + wait - time.monotonic()))
                assert store.put(stored_state)
                stored.append(time.monotonic())
                if not within:
                    ended += connection.recv()
            if within:
                ended = connection.recv()
            connection.send(None)
    finally:
        other.join(30)
        other.kill()
    return spread([1e3 * max(0.0, end - start) for start, end in zip(stored, ended, strict=True)])


def _watch(connection: Any, url: str, feed: str | None) -> None:
    with closing(open_store(url, feed=feed)) as store:
        connection.send("ready")
        while (wanted := connection.recv()) is not None:
            left: dict[int, Ids] = dict(enumerate(wanted))
            seen: dict[int, float] = {}
            until = time.monotonic() + _LONGEST
            while left:
                for number, ids in list(left.items()):
                    hit = store.find("p", "e", ids, whole=True)
                    whole = hit is not None and hit[0].tokens == len(ids)
                    if (
                        whole and store.meta(exact_key("p", "e", ids, ())) is not None
                    ) or time.monotonic() > until:
                        seen[number] = time.monotonic()
                        del left[number]
                time.sleep(_POLL)
            connection.send([seen[number] for number in range(len(wanted))])


# A load


def loads(services: Services, folder: Path, times: int) -> dict[str, Any]:
    """Measure lookup and load of 10 MB, verified, by a plain read in turns with it.

    A plain read is a copy for memory, a read of the file for a folder, and for S3 a get of the
    object by a client with the same settings. Nothing is known to be whole: the store in a folder
    is opened anew. `s3_by_get` is the median ratio.
    """
    stored_state, url = prefix(0), services.place()
    for place in (str(folder), url):
        with closing(open_store(place)) as store:
            assert store.put(stored_state)
    (file,) = folder.glob("segments/*/*")
    plain = BucketObjects(url)
    (name,) = (name for name in plain.list() if plain.head(name, 8)[1] > 1 << 20)
    target = np.ones(stored_state.tensor.nbytes, np.uint8)
    source = stored_state.tensor.data.reshape(-1).view(np.uint8)

    def copy() -> None:
        target[:] = source

    kept, far = open_store(), open_store(url, background=False)
    assert kept.put(stored_state)
    rows = {
        "memory": _ratios(stored_state, lambda: nullcontext(kept), copy, times),
        "folder": _ratios(
            stored_state,
            lambda: closing(open_store(folder)),
            lambda: np.fromfile(file, np.uint8),
            times,
        ),
        "s3": _ratios(stored_state, lambda: nullcontext(far), lambda: plain.get(name), times),
    }
    kept.close()
    far.close()
    return {
        "s3_by_get": rows["s3"]["ratio"]["p50"],
        "mb": stored_state.tensor.nbytes / 1e6,
        "loads": rows,
    }


def _ratios(
    stored_state: StoredState,
    opened: Callable[[], AbstractContextManager[Store]],
    plain: Callable[[], object],
    times: int,
) -> dict[str, Any]:
    ours, theirs = list[float](), list[float]()

    def load(store: Store) -> None:
        hit = store.find("p", "e", stored_state.meta.token_ids, whole=True)
        assert hit is not None
        parts = store.get_parts(hit[0].donor)
        assert parts is not None
        assert sum(part.tensor.nbytes for part in parts) == stored_state.tensor.nbytes

    for number in range(times + 1):
        with opened() as store:
            store.find("p", "e", range(32))  # the catalog is read
            both = [(partial(load, store), ours), (plain, theirs)]
            for run, spent in both if number % 2 else reversed(both):
                began = time.perf_counter()
                run()
                if number:  # the first warms up
                    spent.append(time.perf_counter() - began)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "ms": 1e3 * statistics.median(ours),
        "plain_ms": 1e3 * statistics.median(theirs),
        "ratio": spread(ratios),
    }
