"""State that consists of an engine's pages: the store keeps them as they are, and cuts between them alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.store.base import RawTensor, StoredState, joined
from dejakv.store.budgets import now
from dejakv.store.open import open_store
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv.testing.stored_states import deliveries, make_prompt_state
from dejakv.testing.stores import AheadClock

BASE = tuple(range(1000, 1500))
PAGES = [16, 24, 32, 128]


def rows_of(stored_state: StoredState) -> np.ndarray[Any, Any]:
    """The rows of a stored state of single rows `[rows, bytes]`."""
    return (
        np.ascontiguousarray(np.moveaxis(stored_state.tensor.data, 3, 0))
        .reshape(stored_state.stop - stored_state.first, -1)
        .view(np.uint8)
    )


def paged(stored_state: StoredState, page: int) -> StoredState:
    """Its rows in pages, the last one with zeros behind them."""
    rows = rows_of(stored_state)
    whole = np.zeros((-(-len(rows) // page) * page, rows.shape[1]), np.uint8)
    whole[: len(rows)] = rows
    return replace(stored_state, tensor=RawTensor(whole.reshape(1, 1, 1, -1, page * rows.shape[1]), "U8", page))


def check_held(store: Store, stored_state: StoredState, page: int) -> None:
    """The store has all of a prompt, which `stored state` has in single rows, and each prefix of it to its last whole block at least."""
    rows = rows_of(stored_state)
    held = store.get(stored_state.meta.id)
    assert held is not None
    assert held.tensor.page == page
    assert held.tensor.data.reshape(-1, rows.shape[1])[: len(rows)].tobytes() == rows.tobytes()
    for stop in (17, max(16, len(rows) // 2), len(rows)):
        found = store.find("p", "e", stored_state.meta.token_ids[:stop], whole=True)
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
        prompts.append(make_prompt_state(tokens if len(tokens) > 16 else BASE[: 20 + number]))
    for stored_state in prompts:
        ends = [*range(2 * page * 16, stored_state.meta.num_tokens, 2 * page * 16), stored_state.meta.num_tokens]
        for part in deliveries(stored_state, ends):
            assert store.put(paged(part, page))
    for stored_state in prompts:
        check_held(store, stored_state, page)
    row = rows_of(prompts[0]).shape[1]
    distinct = len({one.meta.token_ids[: stop + 1] for one in prompts for stop in range(one.meta.num_tokens)})
    again = sum(128 * row + 4 * 2**10 for _ in prompts)
    assert store.stats().bytes < row * (distinct + 2 * page * len(prompts)) + again
    store.close()
    if disk:
        for path in (tmp_path / "store").glob("*.sqlite*"):
            path.unlink()
        with_another_catalog = open_store(tmp_path / "store")
        for stored_state in prompts:
            found = with_another_catalog.find("p", "e", stored_state.meta.token_ids, whole=True)
            assert found is not None
            assert found[0].tokens == stored_state.meta.num_tokens
        with_another_catalog.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("common", [40, 48, 64, 200])
def test_no_byte_of_a_purged_prompt_is_left_in_a_page_of_others(tmp_path: Path, page: int, common: int) -> None:
    """Of prompts that branch, and of one that is the beginning of another."""
    old = make_prompt_state((*BASE[:common], *range(1, 90)), created=now() - 100)
    young = [
        make_prompt_state(BASE[:common], created=now()),
        make_prompt_state((*BASE[:common], *range(500, 600)), created=now()),
    ]
    store = open_store(tmp_path)
    for stored_state in (old, *young):
        assert store.put(paged(stored_state, page))
    assert store.purge(Selection(older_than=50)).prompts == 1
    for stored_state in young:
        check_held(store, stored_state, page)
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert rows_of(young[0])[-1].tobytes() in files
    own = rows_of(old)[common + 1 :]  # the first token of its own changes too little
    assert not [row for row in own if row.tobytes() in files]
    store.close()


@pytest.mark.parametrize("page", PAGES)
def test_what_prompts_share_of_pages_leaves_in_the_time_of_each(page: int) -> None:
    clock = AheadClock()
    store = Store(clock=clock, background=False)
    brief = make_prompt_state((*BASE[:200], 7), created=now(), ttl=60.0)
    long = make_prompt_state((*BASE[:100], *range(40)), created=now())
    for stored_state in (brief, long):
        assert store.put(paged(stored_state, page))
    check_held(store, brief, page)
    clock.seconds = 61
    assert store.sweep() == 1
    check_held(store, long, page)


@pytest.mark.parametrize(("page", "common"), [(512, 900), (384, 8300), (1024, 9100)])
def test_a_newer_page_that_left_with_names_hides_no_longer_prefix(page: int, common: int) -> None:
    """A prompt that parts inside of a page names that page's blocks anew; nobody else does when it has left."""
    store, tokens = Store(), range(20_000)
    assert store.put(paged(make_prompt_state(tokens), page))
    branch = make_prompt_state((*tokens[:common], *range(50_000, 50_100)))
    assert store.put(paged(branch, page))
    assert store.delete(branch.meta.id)
    store.flush()
    found = store.find("p", "e", [*tokens, 7], whole=True)
    assert found is not None
    assert found[0].tokens == len(tokens)


def test_what_is_no_page_is_refused() -> None:
    """Parts that begin inside of one, and pages too few or too many for their rows."""
    store, stored_state = Store(), make_prompt_state(BASE[:100])
    first, second = (paged(part, 32) for part in deliveries(stored_state, (48, 100)))
    assert store.put(first)
    assert not store.put(second)
    for tensor in (first.tensor.rows(0, 32), replace(first.tensor, page=16)):
        assert not store.put(replace(first, tensor=tensor))
