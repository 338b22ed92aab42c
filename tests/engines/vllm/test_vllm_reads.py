"""What a load reads of the store: the parts that hold its rows, once for all that want them at the same time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.buffers import Buffers
from dejakv.engines.vllm.loads import Loads
from dejakv.engines.vllm.messages import Load
from dejakv.engines.vllm.reads import Reads
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing.prompts import turns

CHUNKS = turns(6)
"""A conversation: the preamble and the first turn are 60 tokens, each further turn has 20."""
LONGEST = CHUNKS[-1]


@pytest.fixture
def store() -> Store:
    store = open_store()
    for chunk in CHUNKS:
        assert store.put(chunk)
    return store


def parts_read(store: Store) -> list[str]:
    """The segments that are read from now on."""
    read: list[str] = []
    tensor = store._tensor
    store._tensor = lambda piece, again: (read.append(piece.record), tensor(piece, again))[1]  # type: ignore[method-assign]
    return read


def test_an_exact_prefix_reads_the_parts_that_hold_it(store: Store) -> None:
    paged: Any = SimpleNamespace(dtype=torch.float32, shape=lambda tokens: (2, 1, 1, tokens, 2))
    loads = Loads(store, 30.0, Buffers(0), 0, paged)
    read = parts_read(store)
    fetched = loads._fetch(Load("r", (LONGEST.meta.id,), (0, 1), 16, 54))
    assert not isinstance(fetched, str)
    assert fetched.state is not None
    assert torch.equal(fetched.state, borrowed(LONGEST.tensor)[:, :, :, 16:70])
    assert read == [CHUNKS[0].meta.id, CHUNKS[1].meta.id]
    loads.close()


def test_a_read_serves_others_that_want_no_more_of_the_chunk(store: Store) -> None:
    id, read = LONGEST.meta.id, parts_read(store)
    reads = Reads(store)
    reads.expect([id] * 5)
    first = reads.read(id, [(0, 70)])
    assert reads.read(id, [(16, 64)]) is first
    assert len(read) == 2
    whole = reads.read(id)
    assert whole is not None
    (chunk,) = whole
    assert chunk.rows is None
    assert torch.equal(borrowed(chunk.tensor), borrowed(LONGEST.tensor))
    assert reads.read(id, [(100, 110)]) is whole
    assert len(read) == 2 + len(CHUNKS)
    reads.done([id] * 5)
    assert not reads._reads
