"""Prompts that begin alike, with state as a model would give it, for tests of what shares it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dejakv.identity import exact_key
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.store import Store
from dejakv.testing.chunks import same_bits

PREAMBLE = tuple(range(1000, 1040))


def prompt_chunk(
    tokens: Sequence[int],
    *,
    partition: str = "p",
    epoch: str = "e",
    width: int = 2,
    created: float = 1.0,
    **fields: Any,
) -> Chunk:
    """Exact state of a prompt, in which each row depends on all tokens up to its own, as in a model: equal prefixes have equal
    rows. `[2, 1, 1, tokens, width]` float32."""
    chain = np.empty(len(tokens), np.uint64)
    state = 7
    for place, token in enumerate(tokens):
        state = (state * 6364136223846793005 + token + 1) % 2**64
        chain[place] = state
    planes = np.arange(1, 2 * width + 1, dtype=np.uint64).reshape(2, 1, 1, 1, width)
    data = ((chain.reshape(1, 1, 1, -1, 1) * planes) >> np.uint64(40)).astype(np.float32)
    digests = [span.digest for span in fields.get("spans", ())]
    meta = ChunkMeta(
        id=exact_key(partition, epoch, tokens, digests),
        partition=partition,
        epoch=epoch,
        token_ids=tuple(tokens),
        prompt=f"prompt {tokens[-1]}",
        chunk=f"chunk {tokens[-1]}",
        created=created,
        **fields,
    )
    return Chunk(meta, Tensor(data, "F32"))


def turns(count: int, *, length: int = 20, first: int = 0) -> list[Chunk]:
    """A conversation after the preamble: each prompt continues the one before."""
    tokens = PREAMBLE
    chunks: list[Chunk] = []
    for turn in range(count):
        tokens += tuple(range(first + 100 * turn, first + 100 * turn + length))
        chunks.append(prompt_chunk(tokens))
    return chunks


def deliveries(chunk: Chunk, ends: Sequence[int]) -> list[Chunk]:
    """A prompt's state in parts, its first rows first."""
    data, dtype = chunk.tensor.data, chunk.tensor.dtype
    return [
        Chunk(chunk.meta, Tensor(np.ascontiguousarray(data[:, :, :, start:end]), dtype), [(start, end)])
        for start, end in pairwise((0, *ends))
    ]


def told_by(store: Store) -> list[str]:
    told: list[str] = []
    store.on_evict(told.append)
    return told


def ids(store: Store) -> set[str]:
    return {meta.id for meta in store.metas()}


def check_whole(store: Store, chunks: Sequence[Chunk]) -> None:
    """All are there, whole, as they were."""
    for chunk in chunks:
        found = store.get(chunk.meta.id)
        assert found is not None
        assert found.rows is None
        assert same_bits(found.tensor, chunk.tensor)
        assert found.meta.nbytes == chunk.tensor.nbytes
        assert (found.meta.token_ids, found.meta.prompt) == (chunk.meta.token_ids, chunk.meta.prompt)
