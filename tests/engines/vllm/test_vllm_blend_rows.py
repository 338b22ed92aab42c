"""Which rows a blend computes: those of the transformers engine, but for the last ones, which are vLLM's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.running import blended as run_blend
from vllm_facts import BLENDING, CONFIG, blended, blended_of, changed, donor_of, joined, request
from vllm_harness import DOCS, worker_side

from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.experiments.vllm_engine import VLLMEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    made = VLLMEngine.from_pretrained("docs-lm", settings=BLENDING)
    yield made.for_arm("cache")
    made.close()


@pytest.fixture(scope="module")
def plain() -> TransformersEngine:
    return TransformersEngine.from_pretrained(str(DOCS), dtype="fp32").for_arm("none")


@pytest.fixture
def rows(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each blend, ascending."""
    seen: list[list[int]] = []
    blender = worker_side().blender
    begin = blender.begin

    def watched(*args: Any) -> Any:
        mixing = begin(*args)
        seen.append(mixing.rows.tolist())
        return mixing

    monkeypatch.setattr(blender, "begin", watched)
    return seen


def leave(tail: int, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has vLLM compute the last `tail` rows by itself."""
    side: Any = engine._llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side
    monkeypatch.setattr(side, "settings", replace(side.settings, blend_tail=tail))


@pytest.mark.parametrize(
    ("selector", "tail", "seed"),
    [("similarity", 4, 31), ("similarity", 16, 32), ("prophet", 4, 33), ("prophet", 16, 34)],
)
def test_the_rows_are_the_transformers_engines(
    selector: str,
    tail: int,
    seed: int,
    engine: VLLMEngine,
    plain: TransformersEngine,
    rows: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly where the question holds all rows that vLLM computes. Where it is shorter, the rows that the share paid for
    there are spent before them, so there may be more."""
    leave(tail, engine, monkeypatch)
    config = replace(CONFIG, selector=selector, share=0.3)
    chunk = donor_of(engine, request(seed))
    there = blended(plain, seed, chunk, config).details["blend"]
    done = blended(engine, seed, chunk, config)
    stop = done.prompt_tokens - tail
    (computed,) = rows
    assert there.active is not None
    wanted = [row for row in there.active if row < stop]
    if tail == 4:
        assert computed == wanted
    assert set(wanted) <= set(computed) <= set(range(stop))
    assert len(computed) <= len(there.active)
    assert done.computed_tokens == tail + len(computed)
    told, donor = done.details["vllm"], chunk.meta.num_tokens
    assert told["bytes_loaded"] == stop * chunk.tensor.nbytes // donor  # nothing of the rows that vLLM computes


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        ({"selector": "similarity", "share": 0.1, "tail": 6}, 51),
        ({"selector": "similarity", "by_need": False, "share": 0.25}, 52),  # sentences that the share does not pay for
        ({"selector": "similarity", "share": 0.3, "surroundings": False, "offsets": False}, 53),
        ({"selector": "prophet", "map": "lsh"}, 54),
    ],
)
def test_every_setting_of_a_blend_counts_in_vllm(
    settings: dict[str, Any],
    seed: int,
    engine: VLLMEngine,
    plain: TransformersEngine,
    rows: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same rows of the same two donors in both engines. vLLM computes the last four, which are the question's."""
    leave(4, engine, monkeypatch)
    config = replace(CONFIG, **settings)
    chunks = [donor_of(engine, request(seed)), donor_of(engine, request(seed + 100))]
    asked = joined(seed, seed + 100)
    there = blended_of(plain, asked, chunks, config).details["blend"]
    done = blended_of(engine, asked, chunks, config)
    stop = done.prompt_tokens - 4
    assert there.active is not None
    assert rows[-1] == [row for row in there.active if row < stop]
    assert len(done.details["vllm"]["donors"]) == 2


@pytest.mark.parametrize(("more", "seed"), [(0.0, 36), (-1e-6, 37)])
def test_a_prompt_is_refused_where_the_transformers_engine_refuses_it(
    more: float, seed: int, engine: VLLMEngine, plain: TransformersEngine
) -> None:
    """At a `max_share` of just what the whole prompt needs it is blended, below that it is not."""
    chunk = donor_of(engine, request(seed))
    needed = blended(plain, seed, chunk).details["blend"].forced_share
    config = replace(CONFIG, max_share=needed + more)
    reports = [
        run_blend(each, each.prepare(changed(seed)), [chunk], config).details["blend"] for each in (plain, engine)
    ]
    assert [report.blended for report in reports] == [more == 0.0] * 2


def test_a_blend_that_costs_more_than_the_exact_prefix_leaves_is_not_run(
    engine: VLLMEngine, plain: TransformersEngine
) -> None:
    """What the pipeline says of the prefix counts in vLLM as it does on transformers."""
    chunk = donor_of(engine, request(44))
    config = replace(CONFIG, max_computed=0.05)
    reports = [run_blend(each, each.prepare(changed(44)), [chunk], config).details["blend"] for each in (plain, engine)]
    assert [report.blended for report in reports] == [False, False]
    assert [report.reason.split(":")[0] for report in reports] == ["the exact prefix is cheaper"] * 2


def test_a_share_of_nothing_leaves_all_to_vllm(engine: VLLMEngine) -> None:
    chunk = donor_of(engine, request(38))
    config = replace(CONFIG, selector="similarity", share=0.0, by_need=False, tail=1)
    assert blended(engine, 38, chunk, config).computed_tokens == BLENDING.blend_tail


def test_a_selector_that_left_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="blend_selector='value'"):
        replace(BLENDING, blend_selector="value")
