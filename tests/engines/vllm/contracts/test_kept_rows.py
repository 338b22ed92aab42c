"""New text of blended prompts: kept for later blends, and never used as exact. What is kept is held in `test_vllm_blend_parity`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import EXTENSION, Engine, running, tokens, worker_side

from dejakv.engines.vllm.worker import SaveWorker
from dejakv.store.base import ROWS, StateInfo

A = tokens(400, 401)
NEW, NEWER = tokens(70, 402), tokens(80, 403)
FIRST = A[100:140] + NEW + A[180:390]
"""A document with a passage in its middle that no stored prompt holds."""
SECOND = NEW + NEWER + A[200:390]
"""A document of that passage, one that is new again, and the rest."""
SETTINGS = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "load_timeout_s": 60.0}


def rows() -> list[StateInfo]:
    return [meta for meta in worker_side().store.metas() if meta.kind == ROWS]


def blended(engine: Engine, prompt: list[int], **wish: Any) -> dict[str, Any]:
    (output,) = engine.ask([prompt], wish={"mode": "blend", **wish})
    assert output.told["method"] == "blend", output.told["reason"]
    engine.settle()
    return output.told


def test_rows_outlive_a_restart_and_generations_are_bounded(tmp_path: Path) -> None:
    """Text that was computed beside rows of the last generation allowed serves nobody; these rows do. The first test here: only one engine may run in a process."""
    extra = {**SETTINGS, "store_dir": str(tmp_path), "max_generation": 1}
    with running(extra=extra, worker_extension_cls=EXTENSION) as first:
        first.ask([A])
        first.settle()
        assert blended(first, FIRST)["rows_kept"]
        (kept,) = rows()
    with running(extra=extra, worker_extension_cls=EXTENSION) as second:
        told = blended(second, NEW + NEWER)  # whose model is not checked with what is no exact state
        assert (told["donors"], told["rows_kept"]) == ([kept.id], 0)
        assert [meta.id for meta in rows()] == [kept.id]


def test_text_behind_too_much_other_text_serves_no_blend() -> None:
    """The same donor serves a prompt that holds all its text, in another order."""
    with running(extra={**SETTINGS, "foreign_context": 8}, worker_extension_cls=EXTENSION) as engine:
        engine.ask([A])
        engine.settle()
        blended(engine, A[200:390] + A[:200])
        (output,) = engine.ask([NEW + A[200:390]], wish={"mode": "blend", "no_store": True})
        assert output.told["method"] == "none"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(extra=SETTINGS, worker_extension_cls=EXTENSION) as made:
        made.ask([A])
        made.settle()
        yield made


@pytest.fixture
def engine(started: Engine) -> Iterator[Engine]:
    """With nothing kept of blends."""
    yield started
    for meta in rows():
        worker_side().store.delete(meta.id)
    started.reset_prefix_cache()


def test_rows_are_never_exact(engine: Engine) -> None:
    """Requests for the very tokens of what is kept, and for the prompt it stood in, are computed."""
    told = blended(engine, FIRST)
    (kept,) = rows()
    assert told["rows_kept"] == kept.num_tokens == engine.metrics()["vllm:dejakv_rows_kept"]
    assert list(kept.token_ids[: len(NEW)]) == NEW
    for prompt in (list(kept.token_ids), FIRST, [*kept.token_ids, *tokens(20, 404)]):
        engine.reset_prefix_cache()
        (truth,) = engine.ask([prompt], wish={"mode": "off", "no_store": True}, salt="truth")
        (exact,) = engine.ask([prompt], wish={"mode": "exact", "no_store": True})
        assert (exact.told["method"], exact.cached, exact.tokens) == ("none", 0, truth.tokens)


def test_who_wants_nothing_kept_keeps_nothing_and_other_partitions_see_nothing(engine: Engine) -> None:
    assert blended(engine, FIRST, no_store=True)["rows_kept"] == 0
    assert rows() == []
    engine.reset_prefix_cache()
    blended(engine, FIRST)
    (other,) = engine.ask([SECOND], wish={"mode": "blend", "no_store": True}, salt="somebody-else")
    assert other.told["method"] == "none"


def test_rows_of_a_donor_that_was_removed_meanwhile_are_not_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would have had to leave with it."""
    donor, submit = tokens(300, 405), SaveWorker.submit
    engine.ask([donor])
    engine.settle()
    key = engine.ask([donor], wish={"no_store": True})[0].told["prompt_key"]

    def late(saver: SaveWorker, *save: Any) -> None:
        worker_side().store.delete(key)
        submit(saver, *save)

    monkeypatch.setattr(SaveWorker, "submit", late)
    blended(engine, tokens(50, 406) + donor[60:290])
    assert rows() == []
