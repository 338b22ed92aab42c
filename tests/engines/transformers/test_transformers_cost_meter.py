"""What work takes is counted from the model's shape and follows what was seen."""

from dataclasses import replace

import pytest
from tests.tiny_models import text_model, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.costs import BLEND_ROWS, COUNTED, MASKED, MIN_BYTES, SEEN, CostMeter, ReuseCosts
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.capabilities import count_costs
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv_models.docs import prompt_of

SMOLLM2 = ReuseCosts(row=2 * 106_000_000, pair=4 * 30 * 576, masked=MASKED, token_bytes=46_080)


def test_the_shape_is_the_models() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32
    counted = ReuseCosts(2 * 3 * layer, 4 * 3 * 64, masked=MASKED, token_bytes=2 * 3 * 2 * 16 * 4)
    assert count_costs(model, "sdpa") == counted


def test_a_prefix_pays_unless_it_is_very_short_and_its_mask_costs_more() -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50))
    costs = CostMeter(count_costs(model, "sdpa"), None).costs()
    assert costs.prefix(16, 10_000) > costs.full(10_000)
    assert costs.prefix(6_000, 10_000) < costs.full(10_000)
    costs = CostMeter(count_costs(model, "eager"), None).costs()  # each prompt has a mask there
    assert costs.prefix(1, 10_000) < costs.full(10_000)


def test_rows_late_in_a_prompt_attend_to_more() -> None:
    costs = replace(CostMeter(SMOLLM2, None).costs(), masked=1.0)
    assert costs.rows(100, 1_000) < costs.prefix(900, 1_000)
    assert costs.prefix(0, 1_000) == pytest.approx(costs.full(1_000))
    both = costs.full(500) + costs.prefix(500, 1_000)  # a prompt in two parts
    assert both == pytest.approx(costs.full(1_000))


def test_a_model_that_cannot_be_timed_is_counted() -> None:
    meter = CostMeter(SMOLLM2, None)
    meter.time()
    costs = meter.costs()
    assert costs.row == COUNTED * SMOLLM2.row
    assert costs.byte == 0
    assert costs == CostMeter(SMOLLM2, None).costs()


def test_the_model_is_run_once_and_only_when_asked() -> None:
    rows: list[int] = []
    meter = CostMeter(SMOLLM2, rows.append)
    assert not rows
    meter.time()
    seen = len(rows)
    meter.time()
    assert 2 <= len(rows) == seen
    assert meter.costs().row > 0


def test_a_stall_while_the_model_is_timed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passes = 0.0, 0

    def forward(rows: int) -> None:
        nonlocal now, passes
        passes += 1
        now += 5.0 if passes == 2 else 0.01 * rows

    monkeypatch.setattr("time.perf_counter", lambda: now)
    meter = CostMeter(SMOLLM2, forward)
    meter.time()
    assert meter.costs().full(8) == pytest.approx(0.08, rel=0.01)


@pytest.mark.parametrize("slower", [0.25, 4.0])
def test_costs_follow_what_requests_took(slower: float) -> None:
    meter = CostMeter(SMOLLM2, None)
    before = meter.costs()
    meter.observe_prompt(600, 600, slower * before.full(600))
    assert meter.costs() == before  # one request may have been held up by anything
    for _ in range(10):
        meter.observe_prompt(600, 600, slower * before.full(600))
    assert meter.costs().row == pytest.approx(slower * before.row)
    assert meter.costs().pair == pytest.approx(slower * before.pair)


def test_prefixes_and_blends_teach_as_whole_prompts_do() -> None:
    meter = CostMeter(SMOLLM2, None)
    costs = meter.costs()
    for _ in range(10):
        meter.observe_prompt(300, 900, costs.prefix(600, 900))
        meter.observe_blend(200, 900, costs.rows(200, 900) + 900 * 0.2 * costs.row)
    assert meter.costs().row == pytest.approx(costs.row)
    assert meter.costs().blend == pytest.approx(0.2 * costs.row)
    assert costs.blend == pytest.approx(BLEND_ROWS * costs.row)


def test_a_slow_spell_does_not_rule_a_plan_out_for_good() -> None:
    meter = CostMeter(SMOLLM2, None)
    before = meter.costs()
    for _ in range(10):
        meter.observe_blend(200, 900, 100 * before.full(900))
        meter.observe_load(MIN_BYTES, 10.0)
    assert meter.costs().blend > 10 * before.blend
    for _ in range(SEEN):
        meter.observe_prompt(900, 900, before.full(900))
    after = meter.costs()
    assert after.blend == pytest.approx(before.blend)
    assert after.byte == before.byte


def test_short_work_teaches_nothing() -> None:
    meter = CostMeter(SMOLLM2, None)
    before = meter.costs()
    for _ in range(10):
        meter.observe_prompt(1, 600, 0.01)
        meter.observe_blend(1, 600, 0.01)
        meter.observe_load(1000, 1.0)
    assert meter.costs() == before


def test_the_engine_is_timed_when_a_cache_needs_it() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    assert engine.costs(timed=False).byte == 0, "counted as yet"
    assert engine.costs().byte > 0


@pytest.mark.parametrize(("held", "method"), [(5, "none"), (60, "prefix")])
def test_a_request_is_computed_in_full_where_that_is_faster(docs_engine, held: int, method: str) -> None:
    """The documents model is narrow, so attention is most of its work: a few held tokens of many do not pay."""
    words = [f"fact {number} is here." for number in range(150)]
    same = ["Ann lives in Paris."] * held
    first, second = (prompt_of(" ".join([*same, *order]), "Where?") for order in (words, words[::-1]))
    cache = build_cache(SemanticCacheConfig(index_encoder="model"), docs_engine)
    with_cache = Pipeline(docs_engine, cache)
    try:
        records = []
        for prompt in (first, second, first):
            request = Request("r", prompt, prompt, sampling=Sampling(1))
            records.append(with_cache.answer(request).record)
            cache.flush()
    finally:
        cache.close()
    assert [record.method for record in records] == ["none", method, "exact"]
    assert "exact prefix" in records[1].plans  # it was there
    assert records[1].statuses["kv_cache"] == ("hit" if method == "prefix" else "miss")
