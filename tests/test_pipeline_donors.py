"""What a blend reads of its donors: the rows that it takes, after it is known which these are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.documents import DOCUMENT
from tests.test_pipeline_rows import BLEND, FOURTH, SECOND, THIRD, joined

from dejakv.store.base import RawTensor, Rows, StoredState

FIRST = joined(SECOND, DOCUMENT.text)
OTHER = joined(THIRD, FOURTH)
WANTED = joined(DOCUMENT.text, THIRD)
"""Its texts stand behind others in FIRST and OTHER."""


@pytest.fixture
def pipeline(served: Any) -> Any:
    pipeline = served(replace(BLEND, max_generation=0))
    for known in (FIRST, OTHER):
        pipeline.answer(replace(known, sampling=replace(known.sampling, max_new_tokens=1)))
    return pipeline


def read_through(pipeline: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Rows]:
    """What is read of each donor; `change` gets a part and hands on what the engine gets, None for what cannot be read."""
    asked: dict[str, Rows] = {}
    store = pipeline.cache.store
    get_parts = store.get_parts

    def reading(id: str, rows: Rows, *more: Any) -> list[StoredState] | None:
        asked[id] = rows
        parts = [change(part, rows) for part in get_parts(id, rows, *more)]
        return None if None in parts else parts

    monkeypatch.setattr(store, "get_parts", reading)
    return asked


def test_a_blend_reads_the_rows_that_it_takes_and_uses_no_other(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pipeline.answer(WANTED)
    assert plain.record.method == "blend", plain.record.reason

    def spoiled(stored_state: StoredState, rows: Rows) -> StoredState:
        """With numbers in all other rows that would show in every answer."""
        data = np.full_like(stored_state.tensor.data, 1e30 if stored_state.tensor.data.dtype.kind == "f" else 0x7F00)
        for start, stop in rows:
            here = slice(max(0, start - stored_state.first), max(0, stop - stored_state.first))
            data[:, :, :, here] = stored_state.tensor.data[:, :, :, here]
        return StoredState(stored_state.meta, RawTensor(data, stored_state.tensor.dtype), stored_state.rows)

    asked = read_through(pipeline, spoiled, monkeypatch)
    again = pipeline.answer(WANTED)
    assert again.record.method == "blend"
    assert again.token_ids == plain.token_ids
    assert len(asked) == 2
    for id, rows in asked.items():
        meta = pipeline.cache.store.meta(id)
        assert 0 < sum(stop - start for start, stop in rows) < meta.num_tokens
    held = sum(pipeline.cache.store.meta(id).nbytes for id in asked)
    assert 0 < again.record.bytes_loaded < held


def test_a_donor_that_cannot_be_read_is_left_out(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    document = next(meta.id for meta in pipeline.cache.store.metas() if DOCUMENT.text in meta.prompt)
    read_through(
        pipeline, lambda stored_state, _: stored_state if stored_state.meta.id == document else None, monkeypatch
    )
    answer = pipeline.answer(WANTED)
    assert answer.record.method == "blend", answer.record.reason
    assert answer.record.computed_tokens > len(pipeline.engine.prepare(joined(THIRD)).token_ids) / 2
