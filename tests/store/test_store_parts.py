"""A prompt that is delivered in parts: nobody finds it before the last, and one that fails leaves nothing."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.identity import Span
from dejakv.store import open_store
from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.base import NODE, Chunk, Store, TakesParts, Tensor
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from dejakv.store.parts import outside_media, part_ends
from dejakv.testing.prompts import PREAMBLE, check_whole, deliveries, ids, prompt_chunk

LONG = prompt_chunk((*PREAMBLE, *range(200)))
ENDS = (64, 128, 192, 240)


def deliver(store: Store, chunk: Chunk, ends: tuple[int, ...] = ENDS) -> bool:
    assert isinstance(store, TakesParts)
    return all(store.put_part(part) for part in deliveries(chunk, ends))


@pytest.fixture(params=["memory", "disk", "tiers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    folder = None if request.param == "memory" else tmp_path / "store"
    made = open_store(folder, memory_bytes=1 << 20 if request.param == "tiers" else 0, memory_fill="read")
    yield made
    made.close()


def left(store: Any) -> list[str]:
    """Ids of all that lies in the store, nodes included."""
    while not isinstance(store, DeltaStore):
        store = store.inner
    return [meta.id for meta in store.inner.metas()]


def test_a_prompt_is_there_with_its_last_part(store: Store) -> None:
    assert isinstance(store, TakesParts)
    for part in deliveries(LONG, ENDS):
        assert not ids(store)
        assert store.get(LONG.meta.id) is None
        assert store.put_part(part)
    check_whole(store, [LONG])
    assert ids(store) == {LONG.meta.id}
    assert (store.stats().entries, store.stats().puts) == (1, 1)
    store.drop_parts(LONG.meta, ENDS)
    check_whole(store, [LONG])


def test_parts_of_a_prompt_that_fails_are_removed(store: Store) -> None:
    assert isinstance(store, TakesParts)
    first, second, *_ = deliveries(LONG, ENDS)
    assert store.put_part(first)
    assert store.put_part(second)
    assert len(left(store)) == 2
    store.drop_parts(LONG.meta, ENDS)
    assert not left(store)
    assert store.stats().bytes == 0


def test_a_part_without_those_before_it_is_refused(store: Store) -> None:
    assert isinstance(store, TakesParts)
    first, second, third, _ = deliveries(LONG, ENDS)
    assert not store.put_part(second)
    assert store.stats("p").refused == {"parent": 1}
    assert store.put_part(first)
    assert not store.put_part(third), "rows between them are missing"
    assert not ids(store)


def test_rows_that_others_need_stay(store: Store) -> None:
    assert isinstance(store, TakesParts)
    other = prompt_chunk((*LONG.meta.token_ids[:128], *range(900, 930)))
    for part in deliveries(LONG, ENDS)[:2]:
        assert store.put_part(part)
    assert store.put(other)
    store.drop_parts(LONG.meta, ENDS)
    check_whole(store, [other])
    assert deliver(store, LONG)
    check_whole(store, [other, LONG])


def test_what_is_no_part_is_refused(store: Store) -> None:
    assert isinstance(store, TakesParts)
    part = deliveries(LONG, ENDS)[0]
    spans = (Span(60, 30, "ab" * 32),)
    cuts_a_picture = deliveries(prompt_chunk(LONG.meta.token_ids, spans=spans), (64, 240))[0]
    for wrong in (
        replace(part, meta=replace(part.meta, id="another")),
        replace(part, meta=replace(part.meta, rows_from=239)),
        replace(part, meta=replace(part.meta, kind="rows")),
        Chunk(part.meta, Tensor(np.zeros((2, 3), np.float32), "F32")),
        cuts_a_picture,
    ):
        assert not store.put_part(wrong)
    assert not left(store)


def test_a_part_that_was_a_prompt_before_stays_one(store: Store) -> None:
    """And the whole may be what only held rows for others before."""
    begins = prompt_chunk(LONG.meta.token_ids[:64])
    others = [prompt_chunk((*LONG.meta.token_ids, *range(first, first + 20))) for first in (700, 800)]
    for chunk in (begins, *others):
        assert store.put(chunk)
    assert LONG.meta.id in left(store)
    assert LONG.meta.id not in ids(store)
    assert deliver(store, LONG)
    assert isinstance(store, TakesParts)
    store.drop_parts(LONG.meta, ENDS)
    check_whole(store, [begins, *others, LONG])


@given(
    shared=st.lists(st.integers(20, 240), max_size=4),
    cuts=st.sets(st.integers(1, 14).map(lambda block: 16 * block), max_size=5),
    when=st.integers(0, 6),
)
def test_whatever_others_store_meanwhile_it_is_whole(shared: list[int], cuts: set[int], when: int) -> None:
    ends = (*sorted(cuts), LONG.meta.num_tokens)
    others = [
        prompt_chunk((*LONG.meta.token_ids[:n], *range(5_000 + 40 * i, 5_030 + 40 * i))) for i, n in enumerate(shared)
    ]
    with closing(DeltaStore(MemoryStore())) as store:
        for number, part in enumerate(deliveries(LONG, ends)):
            for other in others if number == when else others[:1]:
                assert store.put(other)
            assert store.put_part(part)
        store.drop_parts(LONG.meta, ends)
        check_whole(store, [LONG, *others[:1]])
        assert all(store.get(other.meta.id) is not None for other in others) or when >= len(ends)
        parents = {meta.parent for meta in store.inner.metas()}
        assert all(meta.id in parents for meta in store.inner.metas() if meta.kind == NODE), "a node that nobody needs"


def test_a_process_that_died_between_parts_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    with closing(DeltaStore(DiskStore(tmp_path / "store"))) as store:
        for part in deliveries(LONG, ENDS)[:3]:
            assert store.put_part(part)
    with closing(DiskStore(tmp_path / "store")) as after:
        assert not list(after.metas())
        assert after.stats().bytes == 0


def test_evicted_parts_end_the_delivery() -> None:
    row = LONG.tensor.nbytes // LONG.meta.num_tokens
    store = DeltaStore(MemoryStore(max_bytes=100 * (row + 8)))
    parts = deliveries(LONG, ENDS)
    assert store.put_part(parts[0])
    assert store.put(prompt_chunk(range(3_000, 3_090)))
    assert not store.put_part(parts[1])
    store.drop_parts(LONG.meta, ENDS)
    assert len(left(store)) == 1


def test_a_prompt_is_admitted_once() -> None:
    """Its later parts are no new sight of it, and pass a rate that its first part has used up."""
    clock = 0.0
    rules = Admission(second_sight=True, max_write_rate=LONG.tensor.nbytes // 8)
    store = AdmittingStore(DeltaStore(MemoryStore()), rules, lambda: clock)
    assert not store.wants(LONG.meta.id, 240, "p")
    assert store.wants(LONG.meta.id, 240, "p")
    assert deliver(store, LONG)
    check_whole(store, [LONG])
    other = prompt_chunk(range(7_000, 7_240))
    assert not store.put_part(deliveries(other, ENDS)[0]), "the bytes of all parts are paid off first"
    clock = 9.0
    assert store.put_part(deliveries(other, ENDS)[0])


def test_a_prompt_in_parts_expires_as_one(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "store")) as store:
        old = replace(LONG, meta=replace(LONG.meta, created=1.0, ttl=10.0))
        assert deliver(store, old)
        assert store.get(LONG.meta.id) is None


@given(
    tokens=st.integers(1, 2_000),
    most=st.integers(1, 700),
    align=st.sampled_from([16, 32, 48]),
    media=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 400)), max_size=4),
)
def test_parts_end_at_blocks_and_outside_media(
    tokens: int, most: int, align: int, media: list[tuple[int, int]]
) -> None:
    spans, at = list[Span](), 0
    for gap, length in media:
        if at + gap + length <= tokens:
            spans.append(Span(at + gap, length, "ab" * 32))
            at += gap + length
    ends = part_ends(tokens, most, align, spans)
    assert ends[-1] == tokens
    assert list(ends) == sorted(set(ends))
    assert all(end % align == 0 and outside_media(end, spans) == end for end in ends[:-1])
    if not spans:
        assert all(end - start <= max(align, most) for start, end in zip((0, *ends), ends, strict=False))
