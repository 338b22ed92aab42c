"""Where a run of a model with fixed state begins, and where its snapshots are taken."""

from dataclasses import dataclass

from dejakv.engines.base import Prepared
from dejakv.engines.transformers.state_layout import StateLayout
from dejakv.identity import BLOCK_TOKENS
from dejakv.request import prefill_boundaries, reusable_tokens
from dejakv.store.base import SNAPSHOT, RawTensor
from dejakv.store.prefix_keys import PrefixKeys, stored_snapshots
from dejakv.store.store import Store

_PARTING_TOKENS = 64
"""Fewest tokens that a snapshot saves where a prompt parts from a stored one."""
_SINGLE_TOKENS = 64
"""Most tokens that are computed one by one behind a snapshot, where a model needs it."""


@dataclass(frozen=True)
class FixedState:
    """Where a run of a model with fixed state begins, and where snapshots are taken.

    Attributes
    ----------
    start : RawTensor or None
        Snapshot behind the cached tokens; None for a run from the beginning.
    places : tuple[int, ...]
        Numbers of tokens of the prompt behind which a snapshot is taken, ascending.
    """

    start: RawTensor | None = None
    places: tuple[int, ...] = ()


def find_start(
    layout: StateLayout,
    prefill_unit: int,
    prepared: Prepared,
    tokens: int,
    store: Store,
    until: float | None,
) -> tuple[int, FixedState]:
    """Find the longest part of a stored prefix that has a snapshot.

    Parameters
    ----------
    layout : StateLayout
        Layout of the model's state.
    prefill_unit : int
        Tokens that the model computes at once; see `Prepared`.
    prepared : Prepared
        The tokenized request.
    tokens : int
        Tokens of the stored prefix.
    store : Store
        Store with the snapshots.
    until : float or None
        When to give up a read, by `time.monotonic`.

    Returns
    -------
    tokens : int
        Tokens before which nothing is computed; 0 without a snapshot.
    fixed : FixedState
        The snapshot, and the places of new ones.
    """
    if prepared.spans:
        return 0, FixedState()
    n, partition = len(prepared.token_ids), prepared.request.partition
    tokens = reusable_tokens(tokens, n, prefill_unit, prepared.spans)
    # A long rest is faster in full than by one token at a time.
    first = max(1, n - 1 - _SINGLE_TOKENS if layout.token_by_token else 1)
    places = range(first, tokens + 1)
    if prefill_unit > 1:
        ends = prefill_boundaries(n, prefill_unit, prepared.spans)
        places = [place for place in ends if place in places]
    keys = PrefixKeys(partition, prepared.epoch, prepared.token_ids, prepared.spans)

    start, snapshot = 0, None
    stored_ids = store.snapshots(partition, prepared.epoch)
    for place, id in stored_snapshots(keys, stored_ids, places):
        state = store.get(id, until)
        # Damaged, or gone meanwhile: the one before it.
        if state is None or state.meta.kind != SNAPSHOT:
            continue
        if layout.fits(state.tensor):
            start, snapshot = place, state.tensor
            break
        store.delete(id)

    # Here this prompt parts from a stored one, as the next ones may.
    new_places = snapshot_places(prefill_unit, prepared, start)
    parting = _parting_place(prefill_unit, prepared, tokens)
    if parting - start >= _PARTING_TOKENS and not layout.token_by_token:
        new_places = tuple(sorted({*new_places, parting}))
    return start, FixedState(snapshot, new_places)


def snapshot_places(
    prefill_unit: int, prepared: Prepared, cached_tokens: int = 0
) -> tuple[int, ...]:
    """Return where a prompt's last snapshot is taken, if that is behind the cached tokens.

    It is the last place at which the same prompt may begin: all but its last token, or but its
    last prefill unit. None is taken of a prompt with pictures, or of which nothing is stored.

    Parameters
    ----------
    prefill_unit : int
        Tokens that the model computes at once; see `Prepared`.
    prepared : Prepared
        The tokenized request.
    cached_tokens : int
        Tokens at the beginning that are not computed.
    """
    if prepared.spans or not prepared.epoch or prepared.request.no_store:
        return ()
    n = len(prepared.token_ids)
    place = reusable_tokens(n, n, prefill_unit, prepared.spans)
    return (place,) if place > cached_tokens else ()


def _parting_place(prefill_unit: int, prepared: Prepared, tokens: int) -> int:
    """Return the last place for a snapshot within a prompt's first `tokens` tokens."""
    if prefill_unit == 1:
        return tokens - tokens % BLOCK_TOKENS
    n = len(prepared.token_ids)
    return reusable_tokens(tokens, n, prefill_unit, prepared.spans)
