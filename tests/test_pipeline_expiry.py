"""Expired state is used by no way of reuse; what is kept of a request lives for the shorter of its own time and the cache's."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ADOPT, COSTS, DOCUMENT, EXACT, FACT, request, wordings

from dejakv.build import build_cache
from dejakv.decide.plan import ReuseRequest
from dejakv.errors import InputError
from dejakv.pipeline import Pipeline
from dejakv.store.base import ROWS
from dejakv.store.open import open_store
from dejakv.testing.stores import AheadClock
from dejakv_models.docs import ask

BLEND = replace(EXACT, reuse="blend", ttl=60.0)
QUESTION = ask(FACT, random.Random(1))


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


def pipeline_of(engine: Any, config: Any, clock: AheadClock, folder: Path | None = None) -> Pipeline:
    store = open_store(folder, clock=clock, background=False)
    return Pipeline(engine, build_cache(config, engine, store=store, background=False))


@pytest.mark.parametrize("config", [EXACT, ADOPT, BLEND], ids=["exact", "adopt", "blend"])
@pytest.mark.parametrize("restart", [False, True])
def test_no_way_of_reuse_finds_expired_state(
    docs_engine: Any, clock: AheadClock, config: Any, restart: bool, tmp_path: Path
) -> None:
    config = replace(config, ttl=60.0, costs=COSTS)
    pipeline = pipeline_of(docs_engine, config, clock, tmp_path)
    first, second = wordings()
    key = pipeline.answer(request(first)).record.key
    assert pipeline.answer(request(second)).record.method != "none"
    clock.seconds = 61
    if restart:
        pipeline.cache.close()
        pipeline = pipeline_of(docs_engine, config, clock, tmp_path)
    prepared = replace(docs_engine.prepare(request(second)), epoch=docs_engine.epoch)
    named = pipeline.cache.find(prepared, ReuseRequest("blend", named=(key,)))
    assert (named.plan.method, named.donor_search.donors) == ("none", ())
    for wanted in (first, second):
        assert pipeline.answer(replace(request(wanted), no_store=True)).record.method == "none"
    pipeline.cache.close()


def test_classes_have_their_own_time(docs_engine: Any, clock: AheadClock) -> None:
    config = replace(BLEND, ttl_prompts=0.0, ttl_rows=40.0, semantic_text=False)
    pipeline = pipeline_of(docs_engine, config, clock)
    pipeline.answer(request(QUESTION, DOCUMENT.text))
    answer = pipeline.answer(request(QUESTION, f"{' '.join('qwxz' for _ in range(40))} {DOCUMENT.text}"))
    assert answer.record.method == "blend"
    lives = {meta.kind: meta.ttl for meta in pipeline.cache.store.metas()}
    assert lives == {"kv": 0.0, ROWS: 40.0}


def test_rows_of_a_blend_live_no_longer_than_its_donors(docs_engine: Any, clock: AheadClock) -> None:
    config = replace(BLEND, ttl=0.0, semantic_text=False)
    pipeline = pipeline_of(docs_engine, config, clock)
    pipeline.answer(request(QUESTION, DOCUMENT.text, ttl=50.0))
    pipeline.answer(request(QUESTION, f"{' '.join('qwxz' for _ in range(40))} {DOCUMENT.text}"))
    rows = [meta for meta in pipeline.cache.store.metas() if meta.kind == ROWS]
    assert rows
    assert all(0 < meta.ttl <= 50.0 for meta in rows)
    clock.seconds = 51
    assert list(pipeline.cache.store.metas()) == []


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "60", True])
def test_a_time_that_is_none(ttl: Any) -> None:
    with pytest.raises(InputError, match="ttl"):
        request(QUESTION, ttl=ttl)
