"""Rows of blended prompts over the whole path: they serve later blends, and nothing else ever sees them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.documents import DOCUMENT, EXACT, FACT, request, uncached

from dejakv.build import build_cache
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN
from dejakv.decide.plan import ReuseRequest
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request
from dejakv.store.base import KV, ROWS, StateInfo
from dejakv_models.docs import ask

BLEND = replace(EXACT, reuse="blend", semantic_text=False)


def strings(alphabet: str, seed: int) -> str:
    """Text of which nothing longer than a few tokens stands in text of another alphabet."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(alphabet, k=4)) + ("." if word % 8 == 7 else "") for word in range(40))


SECOND, THIRD, FOURTH = (strings(alphabet, 1) for alphabet in ("abcdefghijklm", "nopqrstuvwxyz", "0123456789"))
QUESTION = ask(FACT, random.Random(1))


def joined(*texts: str) -> Request:
    """A prompt that holds these texts, in this order."""
    return request(QUESTION, " ".join(texts))


def rows_in(cache: Any) -> list[StateInfo]:
    return sorted((meta for meta in cache.store.metas() if meta.kind == ROWS), key=lambda meta: meta.position)


def holding(pipeline: Pipeline) -> tuple[Answer, list[StateInfo]]:
    """A pipeline that has answered DOCUMENT exactly and SECOND inside a blend: that answer, and the rows kept."""
    pipeline.answer(joined(DOCUMENT.text))
    answer = pipeline.answer(joined(SECOND, DOCUMENT.text))
    assert answer.record.method == "blend", answer.record.reason
    return answer, rows_in(pipeline.cache)


def state_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix == ".safetensors")


def test_new_text_of_a_blended_prompt_is_kept_and_serves_the_next_blend(docs_engine: Any, served: Any) -> None:
    pipeline, plain = served(BLEND), served(replace(BLEND, max_generation=0))
    answer, rows = holding(pipeline)
    assert not holding(plain)[1]
    prompt = docs_engine.prepare(joined(SECOND, DOCUMENT.text)).token_ids
    assert sum(meta.num_tokens for meta in rows) > 0.7 * len(docs_engine.prepare(joined(SECOND)).token_ids)
    for meta in rows:
        stored_state = pipeline.cache.store.get(meta.id)
        assert meta.num_tokens >= SHORTEST_FINDABLE_RUN
        assert meta.token_ids == prompt[meta.position : meta.position + meta.num_tokens]
        assert stored_state.tensor.shape[3] == meta.num_tokens
        assert (meta.generation, meta.metadata["prompt"]) == (1, answer.record.key)
        assert set(meta.metadata["donors"]) == {answer.record.donor}
    assert pipeline.cache.stats("default").rows_kept == sum(meta.num_tokens for meta in rows)
    wanted = joined(THIRD, SECOND)
    found, missed = pipeline.answer(wanted), plain.answer(wanted)
    assert (found.record.method, found.record.level) == ("blend", "copied")
    assert found.record.donor in {meta.id for meta in rows}
    assert missed.record.method in ("none", "prefix")
    assert found.record.computed_tokens < 0.8 * missed.record.computed_tokens


def test_rows_are_never_served_as_exact(docs_engine: Any, served: Any) -> None:
    """The ladder: the blended prompt, the new text alone, what begins with it and what continues it, all asked exactly."""
    pipeline = served(BLEND)
    _, rows = holding(pipeline)
    ids = {meta.id for meta in rows}
    asked = [
        joined(SECOND, DOCUMENT.text),
        joined(SECOND),
        joined(SECOND, THIRD),
        joined(THIRD, SECOND),
    ]
    for wanted in [*asked, *asked]:
        answer = pipeline.answer(replace(wanted, reuse="exact"))
        assert answer.record.method in ("none", "prefix", "exact")
        assert answer.record.donor not in ids
        assert answer.token_ids == uncached(docs_engine, wanted).token_ids
    finder = pipeline.cache.finder
    for meta in rows_in(pipeline.cache):
        hit = pipeline.cache.store.find(meta.partition, meta.epoch, meta.token_ids, whole=True)
        assert hit is None or hit[0].donor not in ids
    assert ids <= {meta.id for meta in rows_in(pipeline.cache)}
    for level in finder.levels:
        assert len(level) == len([meta for meta in pipeline.cache.store.metas() if meta.kind == KV])
    prepared = replace(docs_engine.prepare(joined(FOURTH)), epoch=docs_engine.epoch)
    for mode in ("exact", "adopt"):
        assert pipeline.cache.find(prepared, ReuseRequest(mode, named=(rows[0].id,))).plan.method in ("none", "prefix")
    blend = pipeline.cache.find(prepared, ReuseRequest("blend", named=(rows[0].id,)))
    assert {donor.id for donor in blend.plan.donors} <= ids
    assert blend.exact.method in ("none", "prefix")


def test_generations_are_counted_and_bounded(served: Any) -> None:
    for bound in (1, 2):
        pipeline = served(replace(BLEND, max_generation=bound))
        holding(pipeline)
        answer = pipeline.answer(joined(THIRD, SECOND))
        assert answer.record.method == "blend"
        assert max(meta.generation for meta in rows_in(pipeline.cache)) == bound
        later = pipeline.answer(joined(FOURTH, THIRD))
        assert (later.record.method == "blend") == (bound == 2)


def test_a_lower_bound_after_a_restart_leaves_later_generations_alone(docs_engine: Any, tmp_path: Path) -> None:
    config = replace(BLEND, cache_dir=str(tmp_path / "cache"), max_generation=2)
    first = Pipeline(docs_engine, build_cache(config, docs_engine))
    for texts in ((DOCUMENT.text,), (SECOND, DOCUMENT.text), (THIRD, SECOND)):
        first.answer(joined(*texts))
        first.cache.flush()
    first.cache.close()
    for bound, methods in ((2, ("blend",)), (1, ("none", "prefix"))):
        cache = build_cache(replace(config, max_generation=bound), docs_engine)
        cache.flush()
        answer = Pipeline(docs_engine, cache).answer(replace(joined(FOURTH, THIRD), no_store=True))
        assert answer.record.method in methods
        cache.close()


def test_another_partition_or_model_never_finds_rows(docs_engine: Any, served: Any) -> None:
    pipeline = served(BLEND)
    holding(pipeline)
    wanted = joined(THIRD, SECOND)
    prepared = replace(docs_engine.prepare(wanted), epoch="another epoch")
    assert pipeline.cache.find(prepared).plan.method == "none"
    answer = pipeline.answer(replace(wanted, partition="other"))
    assert answer.record.method == "none"
    assert answer.token_ids == uncached(docs_engine, wanted).token_ids


def test_clearing_and_eviction_take_rows_along(served: Any) -> None:
    pipeline = served(BLEND)
    _, rows = holding(pipeline)
    wanted = joined(THIRD, SECOND)
    for meta in rows[1:]:
        pipeline.cache.store.delete(meta.id)
    assert {meta.id for meta in rows_in(pipeline.cache)} == {rows[0].id}
    pipeline.cache.clear("default")
    assert not list(pipeline.cache.store.metas())
    assert pipeline.answer(replace(wanted, no_store=True)).record.method == "none"


def test_a_request_that_keeps_nothing_keeps_no_rows(served: Any) -> None:
    pipeline = served(BLEND)
    pipeline.answer(joined(DOCUMENT.text))
    assert pipeline.answer(replace(joined(SECOND, DOCUMENT.text), no_store=True)).record.method == "blend"
    assert not rows_in(pipeline.cache)
    assert pipeline.answer(replace(joined(SECOND, DOCUMENT.text), no_store=True)).record.method == "blend"


def test_damaged_rows_are_a_miss(docs_engine: Any, tmp_path: Path) -> None:
    config = replace(BLEND, cache_dir=str(tmp_path / "cache"), memory_bytes=0)
    cache = build_cache(config, docs_engine, background=False)
    pipeline = Pipeline(docs_engine, cache)
    pipeline.answer(joined(DOCUMENT.text))
    before = set(state_files(tmp_path))
    assert pipeline.answer(joined(SECOND, DOCUMENT.text)).record.method == "blend"
    damaged = [path for path in state_files(tmp_path) if path not in before]
    assert len(damaged) == len(rows_in(cache)) > 0
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1000] ^= 1
        path.write_bytes(content)
    wanted = joined(THIRD, SECOND)
    answer = pipeline.answer(wanted)
    assert answer.record.method in ("none", "prefix")
    assert answer.token_ids == uncached(docs_engine, wanted).token_ids
    assert cache.store.stats().corrupt == len(damaged)
    assert not rows_in(cache)
    cache.close()


def test_rows_of_a_blend_are_not_kept_when_its_donor_was_purged_meanwhile(served: Any) -> None:
    pipeline = served(BLEND)
    pipeline.answer(joined(DOCUMENT.text))
    cache = pipeline.cache
    store = cache.store.submit

    def late(*given: Any, **named: Any) -> bool:
        cache.store.clear()
        return store(*given, **named)

    cache.store.submit = late
    assert pipeline.answer(joined(SECOND, DOCUMENT.text)).record.method == "blend"
    assert rows_in(cache) == []
