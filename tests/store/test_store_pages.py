"""State that consists of an engine's pages: the store keeps them as they are, and cuts between them alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.store.base import StoredState, Tensor, joined
from dejakv.store.budgets import now
from dejakv.store.open import open_store
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv.testing.chunks import deliveries, prompt_chunk
from dejakv.testing.stores import AheadClock

BASE = tuple(range(1000, 1500))
PAGES = [16, 24, 32, 128]


def rows_of(chunk: StoredState) -> np.ndarray[Any, Any]:
    """The rows of a chunk of single rows `[rows, bytes]`."""
    return (
        np.ascontiguousarray(np.moveaxis(chunk.tensor.data, 3, 0)).reshape(chunk.stop - chunk.first, -1).view(np.uint8)
    )


def paged(chunk: StoredState, page: int) -> StoredState:
    """Its rows in pages, the last one with zeros behind them."""
    rows = rows_of(chunk)
    whole = np.zeros((-(-len(rows) // page) * page, rows.shape[1]), np.uint8)
    whole[: len(rows)] = rows
    return replace(chunk, tensor=Tensor(whole.reshape(1, 1, 1, -1, page * rows.shape[1]), "U8", page))


def check_held(store: Store, chunk: StoredState, page: int) -> None:
    """The store has all of a prompt, which `chunk` has in single rows, and each prefix of it to its last whole block at least."""
    rows = rows_of(chunk)
    held = store.get(chunk.meta.id)
    assert held is not None
    assert held.tensor.page == page
    assert held.tensor.data.reshape(-1, rows.shape[1])[: len(rows)].tobytes() == rows.tobytes()
    for stop in (17, max(16, len(rows) // 2), len(rows)):
        found = store.find("p", "e", chunk.meta.token_ids[:stop], whole=True)
        assert found is not None
        assert stop - 15 * (stop < len(rows)) <= found[0].tokens <= stop
        stop = found[0].tokens
        first = page if stop > page else 0
        parts = store.get_parts(found[0].donor, [(first, stop)])
        state = None if parts is None else joined(parts, first, stop)
        assert state is not None
        assert state.data.reshape(-1, rows.shape[1])[: stop - first].tobytes() == rows[first:stop].tobytes()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("disk", [False, True])
def test_prompts_that_branch_are_whole(tmp_path: Path, page: int, disk: bool) -> None:
    """Wherever in a page they part, whole or in parts, after a restart without the catalog too; and no more is stored again than a page."""
    rng, prompts = random.Random(page), list[StoredState]()
    store = open_store(tmp_path / "store") if disk else Store()
    for number in range(12):
        shared = rng.choice([0, 40, 48, 64, 96, 250, 256, 300, *(one.meta.num_tokens for one in prompts)])
        begin = rng.choice(prompts).meta.token_ids if prompts else BASE
        tokens = (*begin[:shared], *range(5000 * number, 5000 * number + rng.choice([0, 1, 16, 70, 300])))
        prompts.append(prompt_chunk(tokens if len(tokens) > 16 else BASE[: 20 + number]))
    for chunk in prompts:
        ends = [*range(2 * page * 16, chunk.meta.num_tokens, 2 * page * 16), chunk.meta.num_tokens]
        for part in deliveries(chunk, ends):
            assert store.put(paged(part, page))
    for chunk in prompts:
        check_held(store, chunk, page)
    row = rows_of(prompts[0]).shape[1]
    distinct = len({one.meta.token_ids[: stop + 1] for one in prompts for stop in range(one.meta.num_tokens)})
    again = sum(128 * row + 4 * 2**10 for _ in prompts)
    assert store.stats().bytes < row * (distinct + 2 * page * len(prompts)) + again
    store.close()
    if disk:
        for path in (tmp_path / "store").glob("*.sqlite*"):
            path.unlink()
        with_another_catalog = open_store(tmp_path / "store")
        for chunk in prompts:
            found = with_another_catalog.find("p", "e", chunk.meta.token_ids, whole=True)
            assert found is not None
            assert found[0].tokens == chunk.meta.num_tokens
        with_another_catalog.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("common", [40, 48, 64, 200])
def test_no_byte_of_a_purged_prompt_is_left_in_a_page_of_others(tmp_path: Path, page: int, common: int) -> None:
    """Of prompts that branch, and of one that is the beginning of another."""
    old = prompt_chunk((*BASE[:common], *range(1, 90)), created=now() - 100)
    young = [
        prompt_chunk(BASE[:common], created=now()),
        prompt_chunk((*BASE[:common], *range(500, 600)), created=now()),
    ]
    store = open_store(tmp_path)
    for chunk in (old, *young):
        assert store.put(paged(chunk, page))
    assert store.purge(Selection(older_than=50)).prompts == 1
    for chunk in young:
        check_held(store, chunk, page)
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert rows_of(young[0])[-1].tobytes() in files
    own = rows_of(old)[common + 1 :]  # the first token of its own changes too little
    assert not [row for row in own if row.tobytes() in files]
    store.close()


@pytest.mark.parametrize("page", PAGES)
def test_what_prompts_share_of_pages_leaves_in_the_time_of_each(page: int) -> None:
    clock = AheadClock()
    store = Store(clock=clock, background=False)
    brief = prompt_chunk((*BASE[:200], 7), created=now(), ttl=60.0)
    long = prompt_chunk((*BASE[:100], *range(40)), created=now())
    for chunk in (brief, long):
        assert store.put(paged(chunk, page))
    check_held(store, brief, page)
    clock.seconds = 61
    assert store.sweep() == 1
    check_held(store, long, page)


def test_what_is_no_page_is_refused() -> None:
    """Parts that begin inside of one, and pages too few or too many for their rows."""
    store, chunk = Store(), prompt_chunk(BASE[:100])
    first, second = (paged(part, 32) for part in deliveries(chunk, (48, 100)))
    assert store.put(first)
    assert not store.put(second)
    for tensor in (first.tensor.rows(0, 32), replace(first.tensor, page=16)):
        assert not store.put(replace(first, tensor=tensor))
