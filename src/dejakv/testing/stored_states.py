"""Stored states for tests: with random content, or with state as a model would compute it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dejakv.errors import former_names
from dejakv.identity import exact_key
from dejakv.store.base import NUMPY_DTYPES, RawTensor, StateInfo, StoredState
from dejakv.store.store import Store

__getattr__ = former_names(
    __name__, make_chunk="make_stored_state", prompt_chunk="make_prompt_state"
)

PREAMBLE = tuple(range(1000, 1040))


def make_stored_state(
    number: int = 0,
    *,
    partition: str = "p",
    epoch: str = "e",
    nbytes: int = 4096,
    dtype: str = "F32",
    seed: int | None = None,
    **fields: Any,
) -> StoredState:
    """Make a stored state with random content; equal arguments give equal stored states.

    Parameters
    ----------
    number : int
        Number of the prompt: with `partition` and `epoch` it makes the id.
    partition, epoch : str
        Partition and epoch of the stored state.
    nbytes : int
        Approximate size of the tensor, which is shaped `[2, 1, 2, tokens, 2]`.
    dtype : {"F32", "F16", "BF16", "U8", "I64"}
        Type of the tensor.
    seed : int, optional
        Other content for the same prompt; by default `number`.
    fields : Any
        Further fields of `StateInfo`: vectors, spans, answer, metadata.
    """
    kind = np.dtype(NUMPY_DTYPES[dtype])
    tokens = max(1, nbytes // kind.itemsize // 8)
    # Random bytes and not numbers: NaN and infinity must come back, too.
    raw = np.random.default_rng(number if seed is None else seed).bytes(
        2 * 1 * 2 * tokens * 2 * kind.itemsize
    )
    data = np.frombuffer(raw, dtype=kind).reshape(2, 1, 2, tokens, 2)
    token_ids = (number, *range(16))
    meta = StateInfo(
        id=exact_key(partition, epoch, token_ids, ()),
        partition=partition,
        epoch=epoch,
        token_ids=token_ids,
        # Letters outside of ASCII, so that lengths in bytes and characters differ.
        prompt=f"Question {number}: what is it? Größe 漢字",
        chunk=f"what is it {number}",
        space=f"{partition}/{epoch}",
        **fields,
    )

    return StoredState(meta, RawTensor(data, dtype))


def make_prompt_state(
    tokens: Sequence[int],
    *,
    partition: str = "p",
    epoch: str = "e",
    width: int = 2,
    created: float = 1.0,
    **fields: Any,
) -> StoredState:
    """Make the exact state of a prompt, `[2, 1, 1, tokens, width]` float32.

    A row depends on all tokens up to its own, as in a model: equal prefixes have equal rows.

    Parameters
    ----------
    tokens : sequence of int
        Token ids of the prompt, one or more.
    partition, epoch : str
        Partition and epoch of the stored state.
    width : int
        Components of a key and of a value.
    created : float
        Time of the computation, in seconds since 1970.
    fields : Any
        Further fields of `StateInfo`: vectors, spans, answer, metadata.
    """
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
    meta = StateInfo(
        id=exact_key(partition, epoch, tokens, digests),
        partition=partition,
        epoch=epoch,
        token_ids=tuple(tokens),
        prompt=f"prompt {tokens[-1]}",
        chunk=f"chunk {tokens[-1]}",
        created=created,
        **fields,
    )
    return StoredState(meta, RawTensor(data, "F32"))


def deliveries(stored_state: StoredState, ends: Sequence[int]) -> list[StoredState]:
    """Cut a prompt's state into parts that end at `ends`, its first rows first."""
    data, dtype = stored_state.tensor.data, stored_state.tensor.dtype
    return [
        StoredState(
            stored_state.meta,
            RawTensor(np.ascontiguousarray(data[:, :, :, start:end]), dtype),
            [(start, end)],
        )
        for start, end in pairwise((0, *ends))
    ]


def same_bits(first: RawTensor, second: RawTensor) -> bool:
    """Return whether two tensors are equal in type, shape and every byte."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.data.tobytes() == second.data.tobytes()
    )


def ids(store: Store) -> set[str]:
    """Return the ids of a store's entries."""
    return {meta.id for meta in store.metas()}


def check_whole(store: Store, stored_states: Sequence[StoredState]) -> None:
    """Assert that a store has all stored states, whole and unchanged."""
    for stored_state in stored_states:
        loaded = store.get(stored_state.meta.id)
        assert loaded is not None
        assert loaded.rows is None
        assert same_bits(loaded.tensor, stored_state.tensor)
        assert loaded.meta.nbytes == stored_state.tensor.nbytes
        assert (loaded.meta.token_ids, loaded.meta.prompt) == (
            stored_state.meta.token_ids,
            stored_state.meta.prompt,
        )
