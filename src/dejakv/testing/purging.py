"""The conformance suite of purges, for a store under a `Store`."""

import time
from typing import Any

import numpy as np
import pytest

from dejakv.store.base import ROWS, Chunk, ChunkMeta, Tensor
from dejakv.store.selection import DONORS, PROMPT, Purged, Selection
from dejakv.store.store import Store
from dejakv.testing.made_store import MadeStore
from dejakv.testing.prompts import PREAMBLE, check_whole, deliveries, ids, prompt_chunk, turns


def rows_chunk(name: str, *, donors: tuple[str, ...], prompt: str = "", partition: str = "p", **fields: Any) -> Chunk:
    """Rows that a blend of these donors computed."""
    about = {DONORS: list(donors), PROMPT: prompt}
    meta = ChunkMeta(
        name.ljust(40, "0"), partition, "e", (5, 6), "", "", kind=ROWS, metadata=about, generation=1, **fields
    )
    return Chunk(meta, Tensor(np.ones((2, 1, 1, 2, 2), np.float32), "F32"))


class PurgingTests(MadeStore):
    """What a purge must do with every store. Subclass it with `make_store`."""

    def test_a_donor_leaves_with_all_that_was_made_from_it(self, store: Store) -> None:
        donor, later = turns(2)
        beside = prompt_chunk((*PREAMBLE, *range(5000, 5030)))
        first = rows_chunk("r1", donors=(donor.meta.id,))
        second = rows_chunk("r2", donors=("somebody", first.meta.id))
        own = rows_chunk("r3", donors=("somebody",), prompt=later.meta.id)
        foreign = rows_chunk("r4", donors=(beside.meta.id,))
        for chunk in (donor, later, beside, first, second, own, foreign):
            assert store.put(chunk)
        selection = Selection(donors=(donor.meta.id,))
        before = store.purge(selection, dry_run=True)
        assert len(ids(store)) == 7
        purged = store.purge(selection)
        assert purged == before
        assert (purged.prompts, purged.rows, purged.encoder_outputs) == (2, 3, 0)
        assert ids(store) == {beside.meta.id, foreign.meta.id}
        check_whole(store, [beside])
        assert [store.get(chunk.meta.id) for chunk in (donor, later, first, second, own)] == [None] * 5
        assert store.purge(selection) == Purged()

    def test_what_was_made_from_an_evicted_donor_is_still_found(self, store: Store) -> None:
        donor = turns(1)[0]
        made = rows_chunk("r1", donors=(donor.meta.id,))
        store.put(donor)
        store.put(made)
        store.delete(donor.meta.id)
        assert store.get(made.meta.id) is not None
        assert store.purge(Selection(donors=(donor.meta.id,))).rows == 1
        assert ids(store) == set()

    def test_prompts_that_continue_a_purged_one_stay_whole(self, store: Store) -> None:
        old, young = (
            prompt_chunk(chunk.meta.token_ids, created=created)
            for chunk, created in zip(turns(2), (time.time() - 100, time.time()), strict=True)
        )
        assert store.put(old)
        assert store.put(young)
        purged = store.purge(Selection(older_than=50))
        assert (purged.prompts, purged.parts) == (1, 0)
        assert purged.bytes < old.tensor.nbytes, "its rows are also the other's"
        assert ids(store) == {young.meta.id}
        check_whole(store, [young])
        assert store.purge(Selection()).prompts == 1
        assert (list(store.metas()), store.stats().bytes) == ([], 0)

    def test_what_is_from_the_future_is_old(self, store: Store) -> None:
        ahead, here = prompt_chunk((1, 2, 3), created=time.time() + 3600), prompt_chunk((4, 5), created=time.time())
        store.put(ahead)
        store.put(here)
        assert store.purge(Selection(older_than=50)).prompts == 1
        assert ids(store) == {here.meta.id}

    @pytest.mark.parametrize(
        ("selection", "left"),
        [
            (Selection("a"), {("b", "e1"), ("b", "e2")}),
            (Selection(epoch="e2"), {("a", "e1"), ("b", "e1")}),
            (Selection("a", "e2"), {("a", "e1"), ("b", "e1"), ("b", "e2")}),
            (Selection(), set()),
            (Selection("nobody"), {("a", "e1"), ("a", "e2"), ("b", "e1"), ("b", "e2")}),
        ],
    )
    def test_partitions_and_epochs(self, store: Store, selection: Selection, left: set[tuple[str, str]]) -> None:
        for partition in "ab":
            for epoch in ("e1", "e2"):
                for last in (1, 2):
                    assert store.put(prompt_chunk((*PREAMBLE, *[last] * 20), partition=partition, epoch=epoch))
        purged = store.purge(selection)
        assert {(meta.partition, meta.epoch) for meta in store.metas()} == left
        assert (purged.prompts, purged.parts) == (8 - 2 * len(left), 0)
        assert (store.stats().bytes == 0) == (not left)

    def test_another_tenants_donor_is_not_purged(self, store: Store) -> None:
        theirs = prompt_chunk((1, 2, 3), partition="b")
        store.put(theirs)
        assert store.purge(Selection("a", donors=(theirs.meta.id,))) == Purged()
        check_whole(store, [theirs])

    def test_parts_of_a_prompt_that_was_never_finished_leave_too(self, store: Store) -> None:
        """A process that is killed while it stores a long prompt leaves rows, and their tokens, that no prompt needs."""
        unfinished, other = prompt_chunk((*PREAMBLE, *range(200))), prompt_chunk((1, 2, 3), partition="b")
        for part in deliveries(unfinished, (64, 128, 240))[:2]:
            assert store.put(part)
        assert store.put(other)
        selection = Selection("p")
        before = store.purge(selection, dry_run=True)
        assert store.purge(selection) == before
        assert (before.prompts, before.parts) == (0, 2)
        assert before.bytes > 0
        assert ids(store) == {other.meta.id}
        assert store.find("p", "e", unfinished.meta.token_ids) is None

    def test_a_donor_leaves_with_an_unfinished_prompt_that_begins_with_it(self, store: Store) -> None:
        donor, unfinished = prompt_chunk(PREAMBLE), prompt_chunk((*PREAMBLE, *range(200)))
        assert store.put(donor)
        for part in deliveries(unfinished, (64, 128, 240))[:2]:
            assert store.put(part)
        assert store.purge(Selection(donors=(donor.meta.id,))).prompts == 1
        assert (list(store.metas()), store.stats().bytes) == ([], 0)

    def test_what_others_share_inside_of_a_segment_is_kept_for_them(self, store: Store) -> None:
        gone, stays = (prompt_chunk((*PREAMBLE, *range(60), *range(n, n + 90))) for n in (3000, 4000))
        for chunk in (gone, stays):
            assert store.put(chunk)
        assert store.purge(Selection(donors=(gone.meta.id,)), dry_run=True).prompts == 1
        assert store.purge(Selection(donors=(gone.meta.id,))).prompts == 1
        check_whole(store, [stays])
        hit = store.find("p", "e", gone.meta.token_ids)
        assert hit is not None
        assert hit[0].tokens == 100, "no row of its own is left"
