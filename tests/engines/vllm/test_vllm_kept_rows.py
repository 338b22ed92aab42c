"""New text of blended prompts: kept for later blends, with where it stood and what went into it, and never used as exact."""

from typing import Any

import numpy as np
import pytest
from vllm_harness import EXTENSION, Engine, recompute_all, running, tokens, worker_side

from dejakv.store.base import KV, ROWS, ChunkMeta
from dejakv.store.selection import DONORS, PROMPT

A = tokens(400, 401)
NEW, NEWER = tokens(70, 402), tokens(80, 403)
FIRST = A[100:140] + NEW + A[180:390]
"""A document with a passage in its middle that no stored prompt holds."""
SECOND = NEW + NEWER + A[200:390]
"""A document of that passage, one that is new again, and the rest."""
BLEND: dict[str, Any] = {"mode": "blend"}
SETTINGS = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "load_timeout_s": 60.0}


def rows(engine: Engine) -> list[ChunkMeta]:
    """What is kept of blended prompts, in the order in which it came."""
    engine.settle()
    return sorted((meta for meta in worker_side().store.metas() if meta.kind == ROWS), key=lambda meta: meta.created)


def blended(engine: Engine, prompt: list[int], **wish: Any) -> dict[str, Any]:
    (output,) = engine.ask([prompt], wish={**BLEND, **wish})
    assert output.told["method"] == "blend", output.told["reason"]
    return output.told


@pytest.fixture(scope="module")
def engine() -> Any:
    with running(extra=SETTINGS, worker_extension_cls=EXTENSION) as made:
        made.ask([A])
        made.settle()
        yield made


@pytest.fixture(autouse=True)
def _nothing_kept(engine: Engine) -> Any:
    yield
    for meta in rows(engine):
        worker_side().store.delete(meta.id)
    engine.reset_prefix_cache()


def test_new_text_serves_the_next_blend(engine: Engine) -> None:
    told = blended(engine, FIRST)
    (kept,) = rows(engine)
    (donor,) = (meta for meta in worker_side().store.metas() if list(meta.token_ids) == A)
    assert list(kept.token_ids[: len(NEW)]) == NEW
    assert (kept.position, kept.generation, kept.prompt, kept.chunk) == (40, 1, "", "")
    assert kept.metadata[PROMPT] == told["prompt_key"]
    assert list(kept.metadata[DONORS]) == [donor.id]
    assert told["rows_kept"] == kept.num_tokens
    assert engine.metrics()["vllm:dejakv_rows_kept"] >= kept.num_tokens

    again = blended(engine, SECOND)
    assert set(again["donors"]) == {donor.id, kept.id}
    assert again["tokens_recomputed"] < len(SECOND) - 16 - len(NEW)
    second = rows(engine)[-1]
    assert list(second.token_ids[-len(NEWER) :]) == NEWER
    assert (second.position + second.num_tokens, second.generation) == (len(NEW) + len(NEWER), 2)
    assert set(second.metadata[DONORS]) == {donor.id, kept.id}


def test_what_is_kept_is_what_the_model_computed(engine: Engine) -> None:
    """All rows of the prompt are computed, so that the passage's are those of full computation; at its own place in its blocks."""
    blender = worker_side().blender
    before = blender.config
    recompute_all()
    try:
        blended(engine, FIRST)
    finally:
        blender.config = before
    (kept,) = rows(engine)
    got = worker_side().store.get(kept.id).tensor.data
    engine.reset_prefix_cache()
    (truth,) = engine.ask([FIRST], wish={"mode": "exact"})
    engine.settle()
    assert truth.cached == 0
    whole = worker_side().store.get(truth.told["prompt_key"])
    assert whole.meta.kind == KV
    wanted = whole.tensor.data[:, :, :, kept.position : kept.position + kept.num_tokens]
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()
    worker_side().store.delete(truth.told["prompt_key"])


def test_rows_are_never_exact(engine: Engine) -> None:
    """Requests for the very tokens of what is kept, and for the prompt it stood in, are computed."""
    blended(engine, FIRST)
    (kept,) = rows(engine)
    for prompt in (list(kept.token_ids), FIRST, [*kept.token_ids, *tokens(20, 404)]):
        engine.reset_prefix_cache()
        (truth,) = engine.ask([prompt], wish={"mode": "off", "no_store": True}, salt="truth")
        (exact,) = engine.ask([prompt], wish={"mode": "exact", "no_store": True})
        assert exact.told["method"] == "none"
        assert exact.cached == 0
        assert exact.tokens == truth.tokens


def test_who_wants_nothing_kept_keeps_nothing(engine: Engine) -> None:
    assert blended(engine, FIRST, no_store=True)["rows_kept"] == 0
    assert rows(engine) == []


def test_another_partition_sees_nothing_of_it(engine: Engine) -> None:
    blended(engine, FIRST)
    assert rows(engine)
    (other,) = engine.ask([SECOND], wish={**BLEND, "no_store": True}, salt="somebody-else")
    assert other.told["method"] == "none"


def test_rows_of_a_donor_that_was_removed_meanwhile_are_not_stored(engine: Engine) -> None:
    """They would have had to leave with it."""
    saver, store = worker_side().saver, worker_side().store
    submit = saver.submit
    donor = tokens(300, 405)
    engine.ask([donor])
    engine.settle()
    (meta,) = (meta for meta in store.metas() if list(meta.token_ids) == donor)

    def late(*save: Any, **options: Any) -> None:
        store.delete(meta.id)
        submit(*save, **options)

    saver.submit = late
    try:
        blended(engine, tokens(50, 406) + donor[60:290])
        assert rows(engine) == []
    finally:
        saver.submit = submit


def test_a_reset_takes_what_is_under_way_with_it(engine: Engine) -> None:
    """Rows of a prompt that came before the weights may have changed are not kept."""
    side = engine.connector.scheduler_side
    order = side.saves.order

    def reset_first(*args: Any, **options: Any) -> bool:
        side.generations.number += 1
        return order(*args, **options)

    side.saves.order = reset_first
    try:
        blended(engine, FIRST)
    finally:
        side.saves.order = order
    assert rows(engine) == []
