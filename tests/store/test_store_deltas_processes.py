"""Processes that share prompts in one folder, and are killed in the middle of it."""

import random
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.store.layers import layer
from tests.store.test_store_processes import start

from dejakv.store import open_store
from dejakv.store.base import NODE
from dejakv.store.deltas import DeltaStore
from dejakv.testing.chunks import same_bits
from dejakv.testing.prompts import prompt_chunk

PROMPTS = """
import random, sys
from dejakv.store import open_store
from dejakv.testing.chunks import same_bits
from dejakv.testing.prompts import prompt_chunk

def some_prompt(rnd):
    tokens, step = [], 0
    for depth in range(rnd.randrange(1, 5)):
        step = 3 * step + rnd.randrange(3)
        tokens += range(1000 * depth + 30 * step, 1000 * depth + 30 * step + 24)
    return prompt_chunk(tokens[: len(tokens) - rnd.randrange(20)], width=200)

where, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rnd = random.Random(seed)
store = open_store(where, max_bytes=2_500_000)
print("ready", flush=True)
sys.stdin.readline()
wrong = hits = 0
for step in range(steps):
    chunk = some_prompt(rnd)
    store.put(chunk)
    wanted = some_prompt(rnd)
    found = store.get(wanted.meta.id)
    hits += found is not None
    wrong += found is not None and not same_bits(found.tensor, wanted.tensor)
    if step % 9 == 0:
        store.delete(wanted.meta.id)
assert wrong == 0
assert hits > steps / 50, hits
assert store.stats().corrupt == 0, "a chunk was taken for damaged"
store.close()
"""


def go(process: Any) -> None:
    process.stdin.write(b"go\n")
    process.stdin.flush()


def check_prompts(store: DeltaStore) -> int:
    """Reads all that is listed: whole, with parents that are there and nodes that are needed. How many prompts there are."""
    raw = {meta.id: meta for meta in store.inner.metas()}
    parents = {meta.parent for meta in raw.values() if meta.parent}
    assert parents <= set(raw)
    assert {meta.id for meta in raw.values() if meta.kind == NODE} <= parents
    prompts = list(store.metas())
    for meta in prompts:
        found = store.get(meta.id)
        assert found is not None
        assert same_bits(found.tensor, prompt_chunk(meta.token_ids, width=200).tensor)
    stats = store.stats()
    assert (stats.entries, stats.corrupt, stats.misses) == (len(prompts), 0, 0)
    return len(prompts)


def test_two_processes_share_prompts(tmp_path: Path) -> None:
    where = str(tmp_path / "store")
    processes = [start(PROMPTS, where, seed, 150) for seed in (1, 2)]
    for process in processes:
        go(process)
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    with closing(open_store(where)) as store:
        store = layer(store, DeltaStore)
        assert check_prompts(store) > 3
        store.clear()
        assert (list(store.inner.metas()), store.stats().bytes) == ([], 0)


def test_kill_9_leaves_every_prompt_whole(tmp_path: Path) -> None:
    """At random moments, many of them in the middle of a split or of an eviction with parents."""
    folder = tmp_path / "store"
    moments = random.Random(5)
    entries = 0
    for seed in range(8):
        process = start(PROMPTS, folder, seed, 100_000)
        go(process)
        time.sleep(moments.uniform(0.05, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with closing(open_store(folder)) as store:
            store = layer(store, DeltaStore)
            entries = check_prompts(store)
            assert store.stats().bytes <= 2_500_000
            files = len(list((folder / "chunks").glob("*/*")))
            assert files == len(list(store.inner.metas()))
    assert entries > 3


def test_what_another_process_splits_and_deletes_is_seen(tmp_path: Path) -> None:
    """Two stores in one process have connections of their own, as two processes do."""
    with closing(open_store(tmp_path / "store")) as one, closing(open_store(tmp_path / "store")) as two:
        told: list[str] = []
        one.on_evict(told.append)
        held, near, far = (prompt_chunk((*range(40), *range(first, first + 20))) for first in (100, 200, 300))
        assert one.put(held)
        assert two.put(near)
        meta = one.meta(held.meta.id)
        assert meta is not None
        assert meta.rows_from == 40
        assert two.put(far)
        assert two.delete(held.meta.id)
        assert one.meta(held.meta.id) is None
        assert told == [held.meta.id]
        node = prompt_chunk(range(40))
        assert one.meta(node.meta.id) is None
        assert two.put(node)
        again = one.meta(node.meta.id)
        assert again is not None
        assert again.prompt == node.meta.prompt
        assert one.delete(node.meta.id)
        assert two.meta(node.meta.id) is None
        for chunk in (near, far):
            for store in (one, two):
                found = store.get(chunk.meta.id)
                assert found is not None
                assert same_bits(found.tensor, chunk.tensor)
