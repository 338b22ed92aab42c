"""The description of a blend's own rows, and what came from a donor."""

from dataclasses import replace

import numpy as np

from dejakv.cache import described_rows
from dejakv.engines.base import ComputedRows
from dejakv.identity import exact_key
from dejakv.store.base import RawTensor, StateInfo

TOKENS = tuple(range(1000, 1100))
ENTRY = StateInfo("k", "p", "e", TOKENS, "a prompt", "a chunk", metadata={"request": "r"})
ROWS_COMPUTED = ComputedRows(
    ((10, 60),), ("d1", "d2"), 2, lambda first, stop: RawTensor(np.zeros((2, 1, 1, stop - first, 1), np.float32), "F32")
)


def meta_of(entry: StateInfo = ENTRY, rows: ComputedRows = ROWS_COMPUTED, at: int = 10) -> StateInfo:
    return described_rows(entry, rows, at, at + 50)


def test_everything_that_rows_depend_on_is_in_their_id() -> None:
    others = [
        replace(ENTRY, epoch="f"),
        replace(ENTRY, partition="q"),
        replace(ENTRY, token_ids=TOKENS[1:]),
        replace(ENTRY, id="l"),
    ]
    ids = [meta_of(), *(meta_of(other) for other in others), meta_of(at=11)]
    ids += [meta_of(rows=replace(ROWS_COMPUTED, generation=3)), meta_of(rows=replace(ROWS_COMPUTED, donors=("d1",)))]
    keys = [meta.id for meta in ids]
    assert len(set(keys)) == len(keys)
    assert meta_of().id == keys[0]
    assert keys[0] != exact_key("p", "e", TOKENS[10:60], ())
