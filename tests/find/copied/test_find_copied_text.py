"""Copied text over a store: partitions and epochs apart, pictures by digest, a limit of memory."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dejakv.decide.copied.index import CopiedIndex
from dejakv.decide.copied.search import Cover, Run
from dejakv.decide.copied.spaces import CopiedText, tokens_from
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError
from dejakv.identity import Span, exact_key
from dejakv.request import Request
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.chunks import make_chunk
from dejakv.tokens import Ids, with_media

WORDS = list(range(1_000, 1_100))
ONE, OTHER = "aa" * 32, "bb" * 32


def stored(
    store: Store, tokens: Sequence[int], partition: str = "p", epoch: str = "e", spans: tuple[Span, ...] = ()
) -> ChunkMeta:
    chunk = make_chunk()
    id = exact_key(partition, epoch, tokens, [span.digest for span in spans])
    meta = replace(chunk.meta, id=id, partition=partition, epoch=epoch, token_ids=tuple(tokens), spans=spans)
    assert store.put(Chunk(meta, chunk.tensor))
    return meta


def search(
    copied: CopiedText,
    tokens: Sequence[int],
    partition: str = "p",
    epoch: str = "e",
    spans: tuple[Span, ...] = (),
) -> Cover:
    request = Request(id="r", prompt="", chunk="", partition=partition)
    return copied.search(Prepared(request, tuple(tokens), spans), epoch)


@pytest.fixture
def store() -> Store:
    return open_store(max_bytes=1 << 30)


@pytest.fixture
def copied(store: Store) -> CopiedText:
    copied = CopiedText(tokens_from(store))
    store.on_evict(copied.remove)
    return copied


def test_tokens_that_a_search_compared_are_not_made_again(store: Store) -> None:
    """Where rows are estimated: the donors' tokens were arrays a moment ago."""
    tokens_of, asked = tokens_from(store), list[str]()

    def told(id: str) -> Ids | None:
        asked.append(id)
        return tokens_of(id)

    copied = CopiedText(told)
    meta, other = stored(store, [1, 2, *WORDS, 3], spans=(Span(1, 1, ONE),)), stored(store, WORDS, partition="q")
    assert copied.add(meta)
    assert search(copied, [7, *WORDS]).donors == (meta.id,)
    assert asked == [meta.id]
    assert copied.tokens(meta).tolist() == with_media(meta.token_ids, meta.spans).tolist()
    assert asked == [meta.id]
    assert copied.tokens(other).tolist() == WORDS, "of another space, and of a chunk that is not held"


def test_tokens_are_kept_while_there_is_room_and_forgotten_with_their_chunk(store: Store) -> None:
    tokens_of, asked = tokens_from(store), list[str]()

    def told(id: str) -> Ids | None:
        asked.append(id)
        return tokens_of(id)

    copied = CopiedText(told, kept_bytes=1_700)  # two chunks of a hundred tokens
    metas = [stored(store, [*WORDS[:-1], number]) for number in range(3)]
    long = stored(store, range(5_000, 6_000))
    for meta in [*metas, long]:
        copied.add(meta)
    for number in 0, 0, 1, 0, 2, 0, 1:  # the second makes room for the third
        assert copied.tokens(metas[number]).tolist() == list(metas[number].token_ids)
    assert asked == [metas[number].id for number in (0, 1, 2, 1)]
    asked.clear()
    for _ in range(2):  # too large to be kept
        assert len(copied.tokens(long)) == 1_000
    assert asked == [long.id] * 2
    copied.remove(metas[1].id)
    store.delete(metas[1].id)
    assert copied.add(metas[1])
    asked.clear()
    assert search(copied, metas[1].token_ids).gone == 1, "its tokens left with it"


def test_searches_while_others_add_and_remove(store: Store) -> None:
    """Chunks that stay are always found; those that come and go are found whole or not at all."""
    copied, rng = CopiedText(tokens_from(store)), np.random.default_rng(0)
    metas = [stored(store, rng.integers(0, 49_152, 300).tolist()) for _ in range(120)]
    for meta in metas[:20]:
        copied.add(meta)
    failed: list[BaseException] = []
    done = threading.Event()

    def change(metas: list[ChunkMeta]) -> None:
        try:
            for _ in range(6):
                for meta in metas:
                    copied.add(meta)
                for meta in metas:
                    copied.remove(meta.id)
        except BaseException as error:
            failed.append(error)

    def find(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not done.is_set():
                kept, passing = metas[rng.integers(0, 20)], metas[rng.integers(20, 120)]
                target = [*kept.token_ids, *passing.token_ids]
                found = search(copied, target)
                assert found.covered in (300, 600)
                assert kept.id in found.donors
        except BaseException as error:
            failed.append(error)

    changing = [threading.Thread(target=change, args=(metas[20 + part :: 2],)) for part in range(2)]
    searching = [threading.Thread(target=find, args=(seed,)) for seed in range(2)]
    for thread in [*changing, *searching]:
        thread.start()
    for thread in changing:
        thread.join()
    done.set()
    for thread in searching:
        thread.join()
    assert not failed
    assert len(copied) == 20


def test_a_moved_passage_is_found_in_a_stored_chunk(store: Store, copied: CopiedText) -> None:
    meta = stored(store, [1, 2, *WORDS, 3])
    assert copied.add(meta)
    assert not copied.add(meta)
    found = search(copied, [9, *WORDS, 8])
    assert found.runs == (Run(1, 100, meta.id, 2),)


def test_partitions_and_epochs_do_not_see_each_other(store: Store, copied: CopiedText) -> None:
    copied.add(stored(store, WORDS, "p", "e"))
    assert search(copied, WORDS, "q", "e").runs == ()
    assert search(copied, WORDS, "p", "f").runs == ()
    assert search(copied, WORDS, "p", "e").covered == 100


def test_what_one_partition_stores_takes_nothing_from_another(store: Store) -> None:
    """Neither holders of a fingerprint nor memory: the guarded partition's chunk stays, whatever the other adds."""
    copied = CopiedText(tokens_from(store), max_bytes=20_000)
    mine = stored(store, WORDS, "mine")
    copied.add(mine)
    for number in range(200):
        copied.add(stored(store, [*WORDS, *range(10_000 * number, 10_000 * number + 300)], "other"))
    assert len(copied) < 200, "the other's oldest have left"
    found = search(copied, WORDS, "mine")
    assert found.runs == (Run(0, 100, mine.id, 0),)
    assert found.candidates == 1


def test_a_run_never_spans_another_picture(store: Store, copied: CopiedText) -> None:
    before, after = list(range(100, 140)), list(range(200, 250))
    tokens = [*before, *[7] * 60, *after]
    meta = stored(store, tokens, spans=(Span(40, 60, ONE),))
    copied.add(meta)
    same = search(copied, tokens, spans=(Span(40, 60, ONE),))
    assert same.runs == (Run(0, 150, meta.id, 0),)
    other = search(copied, tokens, spans=(Span(40, 60, OTHER),))
    assert other.runs == (Run(0, 40, meta.id, 0), Run(100, 50, meta.id, 100))
    assert search(copied, tokens).covered == 90


def test_what_leaves_the_store_is_not_found(store: Store, copied: CopiedText) -> None:
    meta = stored(store, WORDS)
    copied.add(meta)
    store.delete(meta.id)
    assert search(copied, WORDS).runs == ()
    assert len(copied) == 0
    assert meta.id not in copied
    assert copied.nbytes == 0
    assert not copied.remove(meta.id)


def test_a_chunk_that_is_gone_without_notice_is_not_found(store: Store) -> None:
    copied = CopiedText(tokens_from(store))
    meta = stored(store, WORDS)
    copied.add(meta)
    store.delete(meta.id)
    found = search(copied, WORDS)
    assert (found.runs, found.gone) == ((), 1)


def test_the_oldest_leave_when_the_limit_is_reached(store: Store) -> None:
    copied = CopiedText(tokens_from(store), max_bytes=50_000)
    metas = [stored(store, range(10_000 * number, 10_000 * number + 2_000)) for number in range(40)]
    for meta in metas:
        copied.add(meta)
        assert meta.id in copied
        assert copied.nbytes <= 50_000
    held = [meta.id in copied for meta in metas]
    assert held == sorted(held)
    assert 5 <= sum(held) < 40
    assert search(copied, metas[-1].token_ids).covered == 2_000
    assert search(copied, metas[0].token_ids).covered == 0
    assert copied.add(metas[0])


def test_a_chunk_beyond_the_limit_is_refused_and_pushes_nothing_out(store: Store) -> None:
    copied = CopiedText(tokens_from(store), max_bytes=10_000)
    small = stored(store, WORDS)
    copied.add(small)
    assert not copied.add(stored(store, range(20_000, 40_000)))
    assert small.id in copied


def test_the_index_is_rebuilt_from_the_store(store: Store, copied: CopiedText) -> None:
    for number in range(10):
        copied.add(stored(store, range(1_000 * number, 1_000 * number + 500)))
    again = CopiedText(tokens_from(store))
    for meta in store.metas():
        again.add(meta)
    target = [*range(3_100, 3_200), -1 % 2**32, *range(7_000, 7_200)]
    assert search(again, target).runs == search(copied, target).runs
    assert len(again) == 10


def test_what_a_search_uses_stays_among_the_holders(store: Store, copied: CopiedText) -> None:
    """A hundred newer chunks share the passage; the one that a search has used is still held for it."""
    first = stored(store, [*WORDS, *range(50)])
    copied.add(first)
    search(copied, [*WORDS, *range(50)])
    for number in range(100):
        copied.add(stored(store, [5_000 + number, *WORDS]))
    assert search(copied, [*WORDS, *range(20)]).donors == (first.id,)


@pytest.mark.parametrize("wrong", [{"max_bytes": 0}, {"least": 0}, {"worth": 0}])
def test_bounds_below_one_are_refused(store: Store, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        CopiedText(tokens_from(store), **wrong)


def test_a_space_that_empties_while_others_add_loses_nothing(store: Store) -> None:
    """Three threads add and remove the only chunks of one space, so that its index comes and goes all the time."""
    copied = CopiedText(tokens_from(store))
    metas = [stored(store, range(1_000 * number, 1_000 * number + 64)) for number in range(3)]
    failed: list[BaseException] = []

    def come_and_go(meta: ChunkMeta) -> None:
        try:
            for _ in range(300):
                assert copied.add(meta)
                assert search(copied, meta.token_ids).donors == (meta.id,)
                assert copied.remove(meta.id)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go, args=(meta,)) for meta in metas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (len(copied), copied.nbytes) == (0, 0)


def test_an_empty_index_takes_next_to_nothing() -> None:
    assert CopiedIndex().nbytes < 1_000
    assert np.isfinite(Cover(0).share)
