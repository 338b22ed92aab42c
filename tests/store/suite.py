"""What stores of this package do wherever their bytes are: whom a budget evicts, which prefixes are found, what expires and what a purge takes."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.identity import MediumSpan
from dejakv.store.base import ROWS, RawTensor, StateInfo, StoredState, joined
from dejakv.store.budgets import now
from dejakv.store.prefix_keys import PREFIX, prefix_id
from dejakv.store.selection import DONORS, PROMPT, PurgeResult, Selection
from dejakv.store.store import Store
from dejakv.testing.stored_states import PREAMBLE, check_whole, deliveries, ids, make_prompt_state, make_stored_state
from dejakv.testing.stores import LONG, AheadClock, StoreTests, watch_evictions


def turns(count: int) -> list[StoredState]:
    """A conversation after the preamble: each prompt continues the one before by 20 tokens."""
    told = [token for turn in range(count) for token in range(100 * turn, 100 * turn + 20)]
    return [make_prompt_state((*PREAMBLE, *told[: 20 * turn])) for turn in range(1, count + 1)]


def rows_state(name: str, *donors: str, prompt: str = "") -> StoredState:
    """Rows that a blend of these donors computed."""
    about = {DONORS: list(donors), PROMPT: prompt}
    meta = StateInfo(name.ljust(40, "0"), "p", "e", (5, 6), "", "", kind=ROWS, metadata=about, generation=1)
    return StoredState(meta, RawTensor(np.ones((2, 1, 1, 2, 2), np.float32), "F32"))


def tokens_found(store: Store, stored_state: StoredState, *, whole: bool = True) -> int:
    found = store.find("p", "e", stored_state.meta.token_ids, stored_state.meta.spans, whole=whole)
    return 0 if found is None else found[0].tokens


class WholeStoreTests(StoreTests):
    """`StoreTests`, and what does not depend on the place of the bytes."""

    @pytest.mark.parametrize(
        ("policy", "limit", "left"),
        [("lru", "entries", (0, 2, 3)), ("lfu", "entries", (0, 1, 3)), ("lfu", "bytes", (0, 1, 3))],
    )
    def test_the_least_recently_or_least_often_used_leaves(
        self, tmp_path: Path, policy: str, limit: str, left: tuple[int, ...]
    ) -> None:
        """An entry keeps its count of uses when put again."""
        stored_states = [make_stored_state(number) for number in range(4)]
        most = 3 if limit == "entries" else 3 * self.size(tmp_path / "probe", stored_states[0]) + 512
        with closing(self.make_store(tmp_path / "store", policy=policy, **{f"max_{limit}": most})) as store:
            gone = watch_evictions(store)
            for stored_state in stored_states[:3]:
                store.put(stored_state)
            for number in (0, 0, 0, 1, 1, 2):
                store.get(stored_states[number].meta.id)
            assert store.put(make_stored_state(0, seed=9))
            assert store.put(stored_states[3])
            assert ids(store) == {stored_states[number].meta.id for number in left}
            assert set(gone) == {stored_state.meta.id for stored_state in stored_states} - ids(store)
            assert store.stats().evictions == {limit: 1}

    def test_a_conversation_longer_than_the_budget_of_entries_is_stored(self, tmp_path: Path) -> None:
        stored_states = turns(8)
        with closing(self.make_store(tmp_path / "small", max_entries=3)) as store:
            told = watch_evictions(store)
            for stored_state in stored_states:
                assert store.put(stored_state)
            check_whole(store, stored_states[5:])
            assert ids(store) == {stored_state.meta.id for stored_state in stored_states[5:]}
            assert set(told) == {stored_state.meta.id for stored_state in stored_states[:5]}

    @pytest.mark.parametrize("used", [0, 1, 2])
    def test_ends_leave_before_beginnings(self, tmp_path: Path, used: int) -> None:
        stored_states = [make_prompt_state(LONG[:length], width=64) for length in (256, 512, 768)]
        other = make_prompt_state(range(300), width=64)
        most = round(1.2 * stored_states[-1].tensor.nbytes)
        with closing(self.make_store(tmp_path / "small", max_bytes=most)) as store:
            for stored_state in stored_states:
                assert store.put(stored_state)
            assert store.get(stored_states[used].meta.id) is not None
            assert store.put(other)
            check_whole(store, [stored_states[0], other])
            assert tokens_found(store, stored_states[2]) in (256, 512), "what is left is a prefix without a gap"
            assert store.meta(stored_states[2].meta.id) is None

    def test_the_longest_prefix_is_found_token_by_token(self, store: Store) -> None:
        assert store.put(make_prompt_state(LONG))
        for length in (16, 17, 31, 32, 100, 255, 256, 257, 513, 999):
            other = make_prompt_state((*LONG[:length], *[7] * 30))
            hit = store.find("p", "e", other.meta.token_ids)
            assert hit is not None
            assert hit[0].tokens == length
            begun = joined(store.get_parts(hit[1].id, [(0, length)]) or (), 0, length)
            assert begun is not None
            np.testing.assert_array_equal(begun.data, other.tensor.data[:, :, :, :length])
        assert tokens_found(store, make_prompt_state((*LONG[:10], 7, 7))) == 0, "less than a block"
        assert tokens_found(store, make_prompt_state(LONG), whole=False) == 999

    def test_a_prefix_is_found_whoever_stored_it(self, store: Store) -> None:
        first, second, third = turns(3)
        for stored_state in (first, second, third):
            assert store.put(stored_state)
        assert store.delete(first.meta.id)
        check_whole(store, [second, third])
        assert tokens_found(store, first) == first.meta.num_tokens
        hit = store.find("p", "e", (*first.meta.token_ids, 9, 9))
        assert hit is not None
        assert joined(store.get_parts(hit[0].donor) or (), 0, 60) is not None

    def test_deleting_a_prefix_says_whether_it_was_there(self, store: Store) -> None:
        unfinished = make_prompt_state(LONG)
        assert store.put(StoredState(unfinished.meta, unfinished.tensor.rows(0, 256), [(0, 256)]))
        hit = store.find("p", "e", LONG)
        assert hit is not None
        assert hit[0].donor.startswith(PREFIX)
        assert store.delete(hit[0].donor) is True
        assert store.find("p", "e", LONG) is None
        assert store.delete(hit[0].donor) is False
        assert store.delete(prefix_id(32, bytes(16))) is False

    def test_pictures_are_part_of_a_prefix(self, store: Store) -> None:
        tokens = (*PREAMBLE, *([9] * 30), 1, 2, 3)
        stored_states = [make_prompt_state(tokens, spans=(MediumSpan(40, 30, digest * 32),)) for digest in ("ab", "cd")]
        for stored_state in stored_states:
            assert store.put(stored_state)
        plain, asked, moved = (
            make_prompt_state(tokens),
            make_prompt_state((*tokens[:70], *range(20)), spans=stored_states[0].meta.spans),
            make_prompt_state(tokens, spans=(MediumSpan(41, 30, "ab" * 32),)),
        )
        assert tokens_found(store, plain) == tokens_found(store, moved) == 40, "what is before the picture"
        assert tokens_found(store, asked) == 70, "the picture ends inside of a block"
        assert store.put(plain)
        check_whole(store, [*stored_states, plain])

    def test_what_is_not_exact_is_found_by_no_prefix(self, store: Store) -> None:
        """Rows of blends have no keys."""
        tokens = (*PREAMBLE, *range(30, 80))
        fields: dict[str, Any]
        for fields in ({"kind": ROWS}, {"generation": 1}, {"position": 5}):
            assert store.put(make_prompt_state(tokens, **fields))
        wrong = replace(make_prompt_state(tokens), meta=replace(make_prompt_state(tokens).meta, id="0" * 40))
        assert store.put(wrong)
        assert tokens_found(store, make_prompt_state(tokens)) == 0
        check_whole(store, [wrong])

    def test_parts_of_a_long_prompt_are_prefixes_until_the_last_one_comes(self, store: Store) -> None:
        stored_state = make_prompt_state(LONG)
        parts = deliveries(stored_state, (300, 620, 1000))
        assert store.put(parts[1]) is False, "its first rows are not there"
        for number, part in enumerate(parts):
            assert store.meta(stored_state.meta.id) is None
            assert store.put(part), number
            assert tokens_found(store, stored_state) == part.stop
        check_whole(store, [stored_state])
        assert store.stats("p").refused == {"parent": 1}

    def test_an_expired_entry_is_found_by_no_call(self, store: Store, clock: AheadClock) -> None:
        """It leaves with what no other prompt shares, and listeners are told."""
        brief = make_prompt_state((*PREAMBLE, *range(200, 230)), created=now(), ttl=60.0)
        longer = make_prompt_state((*brief.meta.token_ids, *range(300, 330)), created=now())
        for stored_state in (brief, longer):
            assert store.put(stored_state)
        assert store.sweep() == 0
        check_whole(store, [brief, longer])
        told = watch_evictions(store)
        clock.seconds = 61
        assert store.get(brief.meta.id) is None
        assert store.get_parts(brief.meta.id, [(0, 4)]) is None
        assert store.meta(brief.meta.id) is None
        assert ids(store) == {longer.meta.id}
        assert store.sweep() == 1
        assert brief.meta.id in told
        check_whole(store, [longer])
        store.delete(longer.meta.id)
        assert store.stats().bytes == 0

    def test_a_prompt_that_is_computed_anew_lives_anew(self, store: Store, clock: AheadClock) -> None:
        tokens = (*PREAMBLE, *range(200, 230))
        assert store.put(make_prompt_state(tokens, created=now(), ttl=60.0))
        clock.seconds = 61
        again = make_prompt_state(tokens, created=clock(), ttl=60.0)
        assert store.put(again)
        assert store.sweep() == 0
        check_whole(store, [again])
        clock.seconds = 122
        assert store.get(again.meta.id) is None
        ahead = make_prompt_state((*PREAMBLE, 1), created=clock() + 3600, ttl=10_000.0)
        assert store.put(ahead)
        assert store.get(ahead.meta.id) is None, "another clock made it in the future"
        assert store.sweep() == 2

    def test_what_prompts_share_leaves_in_the_time_of_each(self, store: Store, clock: AheadClock) -> None:
        """No row of the shorter-lived one outlives it, and the longer-lived ones stay whole."""
        brief = make_prompt_state((*PREAMBLE, *range(200, 330)), created=now(), ttl=60.0)
        others = [
            make_prompt_state((*PREAMBLE, *range(200, 220), *range(n, n + 50)), created=now(), ttl=100.0)
            for n in (500, 600)
        ]
        for stored_state in (brief, *others):
            assert store.put(stored_state)
        clock.seconds = 61
        assert tokens_found(store, brief) == 60, "what it shares with prompts that are there"
        store.sweep()
        check_whole(store, others)
        row = brief.tensor.nbytes // 170
        assert sum(part.stop - part.first for part in store.get_parts(others[0].meta.id) or ()) == 110
        assert store.stats().bytes < 160 * row + 8 * 1500, "the beginning is stored once"
        clock.seconds = 101
        assert store.sweep() == 2
        assert store.stats().bytes == 0

    @pytest.mark.parametrize("evicted", [False, True])
    def test_a_donor_leaves_with_all_that_was_made_from_it(self, store: Store, evicted: bool) -> None:
        donor, later = turns(2)
        beside = make_prompt_state((*PREAMBLE, *range(5000, 5030)))
        first = rows_state("r1", donor.meta.id)
        second = rows_state("r2", "somebody", first.meta.id)
        own = rows_state("r3", "somebody", prompt=later.meta.id)
        foreign = rows_state("r4", beside.meta.id)
        for stored_state in (donor, later, beside, first, second, own, foreign):
            assert store.put(stored_state)
        if evicted:
            assert store.delete(donor.meta.id)
        selection = Selection(donors=(donor.meta.id,))
        assert store.purge(replace(selection, partition="another")) == PurgeResult()
        before = store.purge(selection, dry_run=True)
        assert len(ids(store)) == 7 - evicted
        assert store.purge(selection) == before
        expected = (0, 2) if evicted else (2, 3)
        assert (before.prompts, before.rows, before.encoder_outputs) == (*expected, 0)
        gone = {first.meta.id, second.meta.id} if evicted else {c.meta.id for c in (donor, later, first, second, own)}
        assert ids(store) == {c.meta.id for c in (later, own, beside, foreign)} - gone
        check_whole(store, [beside])
        assert [store.get(id) for id in gone] == [None] * len(gone)
        assert store.purge(selection) == PurgeResult()

    def test_prompts_that_share_with_a_purged_one_stay_whole(self, store: Store) -> None:
        """What is from the future is old."""
        tokens = (*PREAMBLE, *range(60))
        old, ahead, *young = (
            make_prompt_state((*tokens, *more), width=64, created=now() + since)
            for more, since in (((), -100), (range(3000, 3090), 3600), (range(4000, 4090), 0), (range(200, 230), 0))
        )
        for stored_state in (ahead, old, *young):
            assert store.put(stored_state)
        purged = store.purge(Selection(older_than=50))
        assert (purged.prompts, purged.parts) == (2, 0)
        assert purged.bytes < old.tensor.nbytes + ahead.tensor.nbytes, "its rows are also the others'"
        assert ids(store) == {stored_state.meta.id for stored_state in young}
        check_whole(store, young)
        assert tokens_found(store, ahead) == 100, "no row of its own is left"
        assert store.purge(Selection()).prompts == 2
        assert (ids(store), store.stats().bytes) == (set(), 0)

    @pytest.mark.parametrize(
        ("selection", "left"),
        [
            (Selection("a"), {"b1", "b2"}),
            (Selection(epoch="2"), {"a1", "b1"}),
            (Selection("a", "2"), {"a1", "b1", "b2"}),
            (Selection(), set()),
            (Selection("nobody"), {"a1", "a2", "b1", "b2"}),
        ],
    )
    def test_a_purge_takes_partitions_and_epochs(self, store: Store, selection: Selection, left: set[str]) -> None:
        for place in ("a1", "a2", "b1", "b2"):
            for last in (1, 2):
                assert store.put(make_prompt_state((*PREAMBLE, *[last] * 20), partition=place[0], epoch=place[1]))
        purged = store.purge(selection)
        assert {meta.partition + meta.epoch for meta in store.metas()} == left
        assert (purged.prompts, purged.parts) == (8 - 2 * len(left), 0)
        assert (store.stats().bytes == 0) == (not left)

    @pytest.mark.parametrize("by_donor", [False, True])
    def test_parts_of_a_prompt_that_was_never_finished_leave_too(self, store: Store, by_donor: bool) -> None:
        """A process that is killed while it stores a long prompt leaves rows, and their tokens, that no prompt needs."""
        unfinished, other = make_prompt_state((*PREAMBLE, *range(200))), make_prompt_state((1, 2, 3), partition="b")
        donor = make_prompt_state(PREAMBLE)
        for stored_state in (*[donor] * by_donor, *deliveries(unfinished, (64, 128, 240))[:2], other):
            assert store.put(stored_state)
        selection = Selection("p", donors=(donor.meta.id,) * by_donor)
        before = store.purge(selection, dry_run=True)
        assert store.purge(selection) == before
        assert before.prompts == by_donor
        assert before.parts > 0
        assert before.bytes > 0
        assert ids(store) == {other.meta.id}
        assert store.find("p", "e", unfinished.meta.token_ids) is None
        assert store.delete(other.meta.id)
        assert store.stats().bytes == 0
