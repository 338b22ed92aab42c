"""Chunks for tests of whatever handles chunks: with random content, or with state as a model would give it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dejakv.identity import exact_key
from dejakv.store.base import NUMPY_DTYPES, ChunkMeta, StoredState, Tensor
from dejakv.store.store import Store

PREAMBLE = tuple(range(1000, 1040))


def make_chunk(
    number: int = 0,
    *,
    partition: str = "p",
    epoch: str = "e",
    nbytes: int = 4096,
    dtype: str = "F32",
    seed: int | None = None,
    **fields: Any,
) -> StoredState:
    """A chunk with random content; equal arguments give equal chunks.

    number   which prompt it is of: with `partition` and `epoch` it makes the id
    nbytes   about how many bytes the tensor has, shaped `[2, 1, 2, tokens, 2]`
    dtype    F32, F16, BF16, U8 or I64
    seed     other content for the same prompt; `number` unless it is given
    fields   further fields of `ChunkMeta`: vectors, spans, answer, metadata
    """
    kind = np.dtype(NUMPY_DTYPES[dtype])
    tokens = max(1, nbytes // kind.itemsize // 8)
    raw = np.random.default_rng(number if seed is None else seed).bytes(2 * 1 * 2 * tokens * 2 * kind.itemsize)
    data = np.frombuffer(raw, dtype=kind).reshape(2, 1, 2, tokens, 2)
    token_ids = (number, *range(16))
    meta = ChunkMeta(
        id=exact_key(partition, epoch, token_ids, ()),
        partition=partition,
        epoch=epoch,
        token_ids=token_ids,
        prompt=f"Question {number}: what is it? Größe 漢字",
        chunk=f"what is it {number}",
        space=f"{partition}/{epoch}",
        **fields,
    )

    return StoredState(meta, Tensor(data, dtype))


def prompt_chunk(
    tokens: Sequence[int],
    *,
    partition: str = "p",
    epoch: str = "e",
    width: int = 2,
    created: float = 1.0,
    **fields: Any,
) -> StoredState:
    """Exact state of a prompt, `[2, 1, 1, tokens, width]` float32. A row depends on all tokens up to its own, as in a model: equal
    prefixes have equal rows."""
    chain = np.empty(len(tokens), np.uint64)
    state = 7
    for place, token in enumerate(tokens):
        # Knuth's generator (MMIX): each value depends on all tokens up to its own.
        state = (state * 6364136223846793005 + token + 1) % 2**64
        chain[place] = state

    planes = np.arange(1, 2 * width + 1, dtype=np.uint64).reshape(2, 1, 1, 1, width)
    # The upper 24 bits, all of which a float32 holds.
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
    return StoredState(meta, Tensor(data, "F32"))


def deliveries(chunk: StoredState, ends: Sequence[int]) -> list[StoredState]:
    """A prompt's state in parts, its first rows first."""
    data, dtype = chunk.tensor.data, chunk.tensor.dtype
    return [
        StoredState(chunk.meta, Tensor(np.ascontiguousarray(data[:, :, :, start:end]), dtype), [(start, end)])
        for start, end in pairwise((0, *ends))
    ]


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.data.tobytes() == second.data.tobytes()


def ids(store: Store) -> set[str]:
    return {meta.id for meta in store.metas()}


def check_whole(store: Store, chunks: Sequence[StoredState]) -> None:
    """All are there, whole, as they were."""
    for chunk in chunks:
        loaded = store.get(chunk.meta.id)
        assert loaded is not None
        assert loaded.rows is None
        assert same_bits(loaded.tensor, chunk.tensor)
        assert loaded.meta.nbytes == chunk.tensor.nbytes
        assert (loaded.meta.token_ids, loaded.meta.prompt) == (chunk.meta.token_ids, chunk.meta.prompt)
