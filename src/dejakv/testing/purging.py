"""The conformance suite of purges, for a store under a `DeltaStore`."""

import time
from typing import Any

import numpy as np
import pytest

from dejakv.store.base import NODE, ROWS, Chunk, ChunkMeta, Store, Tensor
from dejakv.store.deltas import DeltaStore
from dejakv.store.lineage import DONORS, PROMPT
from dejakv.store.purging import purge
from dejakv.store.selection import Purged, Selection
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
    """What a purge must do with every store. Subclass it with the `make_store` of the store below."""

    @pytest.fixture
    def deltas(self, store: Store) -> DeltaStore:
        return DeltaStore(store)

    def test_a_donor_leaves_with_all_that_was_made_from_it(self, deltas: DeltaStore) -> None:
        donor, later = turns(2)
        beside = prompt_chunk((*PREAMBLE, *range(5000, 5030)))
        first = rows_chunk("r1", donors=(donor.meta.id,))
        second = rows_chunk("r2", donors=("somebody", first.meta.id))
        own = rows_chunk("r3", donors=("somebody",), prompt=later.meta.id)
        foreign = rows_chunk("r4", donors=(beside.meta.id,))
        for chunk in (donor, later, beside, first, second, own, foreign):
            assert deltas.put(chunk)
        selection = Selection(donors=(donor.meta.id,))
        before = purge(deltas, selection, dry_run=True)
        assert len(ids(deltas)) == 7
        purged = purge(deltas, selection)
        assert purged == before
        assert (purged.prompts, purged.rows, purged.encoder_outputs) == (2, 3, 0)
        assert ids(deltas) == {beside.meta.id, foreign.meta.id}
        check_whole(deltas, [beside])
        assert [deltas.get(chunk.meta.id) for chunk in (donor, later, first, second, own)] == [None] * 5
        assert purge(deltas, selection) == Purged()

    def test_what_was_made_from_an_evicted_donor_is_still_found(self, deltas: DeltaStore) -> None:
        donor = turns(1)[0]
        made = rows_chunk("r1", donors=(donor.meta.id,))
        deltas.put(donor)
        deltas.put(made)
        deltas.delete(donor.meta.id)
        assert deltas.get(made.meta.id) is not None
        assert purge(deltas, Selection(donors=(donor.meta.id,))).rows == 1
        assert ids(deltas) == set()

    def test_prompts_that_continue_a_purged_one_stay_whole(self, deltas: DeltaStore) -> None:
        old, young = (
            prompt_chunk(chunk.meta.token_ids, created=created)
            for chunk, created in zip(turns(2), (time.time() - 100, time.time()), strict=True)
        )
        assert deltas.put(old)
        assert deltas.put(young)
        purged = purge(deltas, Selection(older_than=50))
        assert (purged.prompts, purged.parts, purged.bytes) == (1, 0, 0)
        assert ids(deltas) == {young.meta.id}
        check_whole(deltas, [young])
        # The rows that stayed leave with the last prompt that needs them.
        assert purge(deltas, Selection()).parts == 1
        assert list(deltas.inner.metas()) == []

    def test_what_is_from_the_future_is_old(self, deltas: DeltaStore) -> None:
        ahead, here = prompt_chunk((1, 2, 3), created=time.time() + 3600), prompt_chunk((4, 5), created=time.time())
        deltas.put(ahead)
        deltas.put(here)
        assert purge(deltas, Selection(older_than=50)).prompts == 1
        assert ids(deltas) == {here.meta.id}

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
    def test_partitions_and_epochs(self, deltas: DeltaStore, selection: Selection, left: set[tuple[str, str]]) -> None:
        for partition in "ab":
            for epoch in ("e1", "e2"):
                for last in (1, 2):
                    assert deltas.put(prompt_chunk((*PREAMBLE, *[last] * 20), partition=partition, epoch=epoch))
        nodes = sum(meta.kind == NODE for meta in deltas.inner.metas())
        purged = purge(deltas, selection)
        assert {(meta.partition, meta.epoch) for meta in deltas.metas()} == left
        assert (purged.prompts, purged.parts) == (8 - 2 * len(left), nodes - len(left))

    def test_another_tenants_donor_is_not_purged(self, deltas: DeltaStore) -> None:
        theirs = prompt_chunk((1, 2, 3), partition="b")
        deltas.put(theirs)
        assert purge(deltas, Selection("a", donors=(theirs.meta.id,))) == Purged()
        check_whole(deltas, [theirs])

    def test_parts_of_a_prompt_that_was_never_finished_leave_too(self, deltas: DeltaStore) -> None:
        """A process that is killed while it stores a long prompt leaves rows, and their tokens, that no prompt needs."""
        unfinished, other = prompt_chunk((*PREAMBLE, *range(200))), prompt_chunk((1, 2, 3), partition="b")
        for part in deliveries(unfinished, (64, 128, 240))[:2]:
            assert deltas.put_part(part)
        assert deltas.put(other)
        selection = Selection("p")
        before = purge(deltas, selection, dry_run=True)
        assert purge(deltas, selection) == before
        assert (before.prompts, before.parts) == (0, 2)
        assert before.bytes > 0
        assert [meta.id for meta in deltas.inner.metas()] == [other.meta.id]

    def test_a_donor_leaves_with_an_unfinished_prompt_that_begins_with_it(self, deltas: DeltaStore) -> None:
        donor, unfinished = prompt_chunk(PREAMBLE), prompt_chunk((*PREAMBLE, *range(200)))
        assert deltas.put(donor)
        for part in deliveries(unfinished, (64, 128, 240))[:2]:
            assert deltas.put_part(part)
        assert purge(deltas, Selection(donors=(donor.meta.id,))).prompts == 1
        assert list(deltas.inner.metas()) == []
