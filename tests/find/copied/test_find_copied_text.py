"""Copied text over a store: partitions and epochs apart, pictures by digest, a limit of memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dejakv.decide.copied.search import CopiedText, DonorCover, TokenRun
from dejakv.engines.base import Prepared
from dejakv.identity import MediumSpan, exact_key
from dejakv.request import Request
from dejakv.store.base import StateInfo, StoredState
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.stored_states import make_stored_state

WORDS = list(range(1_000, 1_100))
ONE, OTHER = "aa" * 32, "bb" * 32


def stored(
    store: Store, tokens: Sequence[int], partition: str = "p", epoch: str = "e", spans: tuple[MediumSpan, ...] = ()
) -> StateInfo:
    stored_state = make_stored_state()
    id = exact_key(partition, epoch, tokens, [span.digest for span in spans])
    meta = replace(stored_state.meta, id=id, partition=partition, epoch=epoch, token_ids=tuple(tokens), spans=spans)
    assert store.put(StoredState(meta, stored_state.tensor))
    return meta


def search(
    copied: CopiedText,
    tokens: Sequence[int],
    partition: str = "p",
    epoch: str = "e",
    spans: tuple[MediumSpan, ...] = (),
) -> DonorCover:
    request = Request(id="r", prompt="", chunk="", partition=partition)
    return copied.search(Prepared(request, tuple(tokens), spans), epoch)


@pytest.fixture
def store() -> Store:
    return open_store(max_bytes=1 << 30)


@pytest.fixture
def copied(store: Store) -> CopiedText:
    copied = CopiedText(store)
    store.listen(removed=copied.remove)
    return copied


def test_what_one_partition_stores_takes_nothing_from_another(store: Store) -> None:
    """No holders of a fingerprint: the guarded partition's stored state is found, whatever the other adds."""
    copied = CopiedText(store)
    mine = stored(store, WORDS, "mine")
    copied.add([mine])
    for number in range(200):
        copied.add([stored(store, [*WORDS, *range(10_000 * number, 10_000 * number + 300)], "other")])
    found = search(copied, WORDS, "mine")
    assert found.runs == (TokenRun(0, 100, mine.id, 0),)
    assert found.candidates == 1


def test_a_run_never_spans_another_picture(store: Store, copied: CopiedText) -> None:
    before, after = list(range(100, 140)), list(range(200, 250))
    tokens = [*before, *[7] * 60, *after]
    meta = stored(store, tokens, spans=(MediumSpan(40, 60, ONE),))
    copied.add([meta])
    same = search(copied, tokens, spans=(MediumSpan(40, 60, ONE),))
    assert same.runs == (TokenRun(0, 150, meta.id, 0),)
    other = search(copied, tokens, spans=(MediumSpan(40, 60, OTHER),))
    assert other.runs == (TokenRun(0, 40, meta.id, 0), TokenRun(100, 50, meta.id, 100))
    assert search(copied, tokens).covered == 90
