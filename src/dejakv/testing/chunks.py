"""Chunks with random content, for tests of whatever handles chunks."""

from typing import Any

import numpy as np

from dejakv.identity import exact_key
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.store import Store

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I64": np.int64}


def make_chunk(
    number: int = 0,
    *,
    partition: str = "p",
    epoch: str = "e",
    nbytes: int = 4096,
    dtype: str = "F32",
    seed: int | None = None,
    **fields: Any,
) -> Chunk:
    """A chunk with random content; equal arguments give equal chunks.

    number            which prompt it is of: with `partition` and `epoch` it makes the id
    nbytes            about how many bytes the tensor has, shaped `[2, 1, 2, tokens, 2]`
    dtype             one of `DTYPES`
    seed              other content for the same prompt; `number` unless it is given
    fields            further fields of `ChunkMeta`: vectors, spans, answer, metadata
    """
    kind = np.dtype(DTYPES[dtype])
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
    return Chunk(meta, Tensor(data, dtype))


def size_in(store: Store, chunk: Chunk) -> int:
    """Bytes that a chunk counts for in an empty store."""
    assert store.stats().entries == 0
    assert store.put(chunk)
    held = store.stats().bytes
    assert store.delete(chunk.meta.id)
    return held


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.data.tobytes() == right.data.tobytes()
