"""The conformance suite of prefixes: what prompts begin with alike is stored once, and found whoever stored it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.identity import Span
from dejakv.store.base import Chunk, joined
from dejakv.store.store import Store
from dejakv.testing.chunks import same_bits
from dejakv.testing.made_store import MadeStore
from dejakv.testing.prompts import PREAMBLE, check_whole, deliveries, ids, prompt_chunk, told_by, turns

LONG = tuple(range(1000, 2000))


def tokens_found(store: Store, chunk: Chunk, *, whole: bool = True) -> int:
    found = store.find("p", "e", chunk.meta.token_ids, chunk.meta.spans, whole=whole)
    return 0 if found is None else found[0].tokens


class PrefixTests(MadeStore):
    """What every store must do. Subclass it with `make_store`."""

    def test_turns_take_little_more_than_the_bytes_of_their_distinct_tokens(self, store: Store) -> None:
        tokens = tuple(range(5000, 5550))
        chunks = [prompt_chunk(tokens, width=256)]
        for turn in range(12):
            tokens += tuple(range(9000 + 100 * turn, 9050 + 100 * turn))
            chunks.append(prompt_chunk(tokens, width=256))
        for chunk in chunks:
            assert store.put(chunk)
        check_whole(store, chunks)
        described = sum(8 * chunk.meta.num_tokens + 1000 for chunk in chunks)
        assert store.stats().bytes < 1.03 * chunks[-1].tensor.nbytes + described
        assert (store.stats().entries, store.stats().puts, store.stats().hits) == (13, 13, 13)

    def test_branches_store_a_shared_beginning_once(self, store: Store) -> None:
        chunks = [prompt_chunk((*LONG[:500], *range(first, first + 40)), width=64) for first in range(100, 900, 100)]
        for chunk in chunks:
            assert store.put(chunk)
        check_whole(store, chunks)
        row = chunks[0].tensor.nbytes // 540
        assert store.stats().bytes < row * (500 + 8 * (40 + 15)) + 8 * (540 * 8 + 2500)

    def test_the_longest_prefix_is_found_token_by_token(self, store: Store) -> None:
        assert store.put(prompt_chunk(LONG))
        for length in (16, 17, 31, 32, 100, 255, 256, 257, 513, 999):
            other = prompt_chunk((*LONG[:length], *[7] * 30))
            assert tokens_found(store, other) == length
            hit = store.find("p", "e", other.meta.token_ids)
            assert hit is not None
            begun = joined(store.get_parts(hit[1].id, [(0, length)]) or (), 0, length)
            assert begun is not None
            np.testing.assert_array_equal(begun.data, other.tensor.data[:, :, :, :length])
        assert tokens_found(store, prompt_chunk((*LONG[:10], 7, 7))) == 0, "less than a block"
        assert tokens_found(store, prompt_chunk(LONG), whole=False) == 999

    def test_a_prefix_is_found_whoever_stored_it(self, store: Store) -> None:
        first, second, third = turns(3)
        for chunk in (first, second, third):
            assert store.put(chunk)
        assert store.delete(first.meta.id)
        check_whole(store, [second, third])
        assert tokens_found(store, first) == first.meta.num_tokens
        hit = store.find("p", "e", (*first.meta.token_ids, 9, 9))
        assert hit is not None
        parts = store.get_parts(hit[0].donor)
        assert parts is not None
        assert joined(parts, 0, 60) is not None

    def test_partitions_and_epochs_share_nothing(self, store: Store) -> None:
        places = [("p", "e"), ("q", "e"), ("p", "f")]
        chunks = [prompt_chunk(LONG[:100], partition=one, epoch=other) for one, other in places[1:]]
        for chunk in chunks:
            assert store.put(chunk)
        assert store.find("p", "e", LONG[:100]) is None
        assert store.find("pe", "", LONG[:100]) is None
        assert store.clear("q") == 1
        check_whole(store, chunks[1:])

    def test_a_prompt_without_a_picture_is_not_handed_the_state_of_one_with_it(self, store: Store) -> None:
        tokens = (*PREAMBLE, *([9] * 30), 1, 2, 3)
        pictures = [(Span(40, 30, digest * 32),) for digest in ("ab", "cd")]
        chunks = [prompt_chunk(tokens, spans=spans) for spans in pictures]
        for chunk in chunks:
            assert store.put(chunk)
        plain = prompt_chunk(tokens)
        assert tokens_found(store, plain) == 40, "what is before the picture"
        assert store.put(plain)
        check_whole(store, [*chunks, plain])
        cropped = replace(chunks[0].meta, spans=(Span(40, 15, "ab" * 32),))
        assert store.find("p", "e", cropped.token_ids, (Span(41, 30, "ab" * 32),)) is not None
        assert tokens_found(store, prompt_chunk(tokens, spans=(Span(41, 30, "ab" * 32),))) == 40

    def test_another_question_about_a_picture_finds_all_of_it(self, store: Store) -> None:
        """The picture ends inside of a block."""
        span = (Span(5, 48, "ab" * 32),)
        picture = (*PREAMBLE[:5], *([9] * 48))
        first, second = (prompt_chunk((*picture, *range(n, n + 20)), spans=span) for n in (100, 200))
        assert store.put(first)
        assert tokens_found(store, second) == 53

    def test_what_is_not_exact_is_found_by_no_prefix(self, store: Store) -> None:
        """Rows of blends have no keys."""
        tokens = (*PREAMBLE, *range(30, 80))
        fields: dict[str, Any]
        for fields in ({"kind": "rows"}, {"generation": 1}, {"position": 5}):
            assert store.put(prompt_chunk(tokens, **fields))
        wrong = replace(prompt_chunk(tokens), meta=replace(prompt_chunk(tokens).meta, id="0" * 40))
        assert store.put(wrong)
        assert tokens_found(store, prompt_chunk(tokens)) == 0
        found = store.get("0" * 40)
        assert found is not None
        assert same_bits(found.tensor, wrong.tensor)

    def test_parts_of_a_long_prompt_are_prefixes_until_the_last_one_comes(self, store: Store) -> None:
        chunk = prompt_chunk(LONG)
        parts = deliveries(chunk, (300, 620, 1000))
        assert store.put(parts[1]) is False, "its first rows are not there"
        for number, part in enumerate(parts):
            assert store.meta(chunk.meta.id) is None
            assert store.put(part), number
            assert tokens_found(store, chunk) == part.stop
        check_whole(store, [chunk])
        assert store.stats("p").refused == {"parent": 1}

    def test_the_parts_that_hold_the_rows_are_read_as_they_are_held(self, store: Store) -> None:
        whole = prompt_chunk(LONG)
        assert store.put(whole)
        for rows in ([(0, 5)], [(300, 310), (900, 905)], [(0, 1000)]):
            parts = store.get_parts(whole.meta.id, rows)
            assert parts is not None
            assert all(one.stop <= other.first for one, other in pairwise(parts))
            held = {row for part in parts for row in range(part.first, part.stop)}
            for start, stop in rows:
                assert set(range(start, stop)) <= held
            assert len(held) <= 256 * len(rows) + (0 if len(rows) > 1 or rows[0][1] < 256 else 1000)
            for part in parts:
                np.testing.assert_array_equal(part.tensor.data, whole.tensor.data[:, :, :, part.first : part.stop])
        assert store.get_parts("0" * 40, [(0, 1)]) is None
        assert (store.stats().hits, store.stats().misses) == (3, 1)

    def test_a_conversation_longer_than_the_budget_of_entries_is_stored(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path / "small", max_entries=3)
        told = told_by(store)
        chunks = turns(8)
        for chunk in chunks:
            assert store.put(chunk)
        check_whole(store, chunks[5:])
        assert ids(store) == {chunk.meta.id for chunk in chunks[5:]}
        assert set(told) == {chunk.meta.id for chunk in chunks[:5]}
        store.close()

    @pytest.mark.parametrize("used", [0, 1, 2])
    def test_ends_leave_before_beginnings(self, tmp_path: Path, used: int) -> None:
        chunks = [prompt_chunk(LONG[:length], width=64) for length in (256, 512, 768)]
        store = self.make_store(tmp_path / "small", max_bytes=round(1.2 * chunks[-1].tensor.nbytes))
        for chunk in chunks:
            assert store.put(chunk)
        assert store.get(chunks[used].meta.id) is not None
        other = prompt_chunk(range(300), width=64)
        assert store.put(other)
        check_whole(store, [chunks[0], other])
        assert tokens_found(store, chunks[2]) in (256, 512), "what is left is a prefix without a gap"
        assert store.meta(chunks[2].meta.id) is None
        store.close()
