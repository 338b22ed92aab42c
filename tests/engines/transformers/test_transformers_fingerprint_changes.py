"""A model that changes while it is served: each line of docs/explanation/exactness.md. The answer is the changed model's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny_models import begun, request, state_of, text_model, tokenizer

import dejakv
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.fingerprint.weights import TURNS
from dejakv.errors import ModelChangedError
from dejakv.pipeline import Pipeline
from dejakv.records import Record

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"
EXACT = SemanticCacheConfig(semantic_text=False)


def noise(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator) * 0.5


def data_added(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(noise(parameter))


def ask(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model answers without DejaKV."""
    return type(model).generate(
        model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )


def test_a_run_with_state_of_the_model_as_it_was_is_refused() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    prepared = engine.prepare(request(PROMPT))
    state = engine.run(prepared).capture()
    assert state is not None
    looked_up = replace(prepared, epoch=engine.epoch)
    start = state_of(engine, prepared, engine.run(prepared), state), 5
    assert begun(engine, looked_up, *start).computed_tokens == len(prepared.token_ids) - 5
    data_added(engine.model)
    with pytest.raises(ModelChangedError, match="look it up again"):
        begun(engine, looked_up, *start)
    assert "another model" in begun(engine, prepared, *start).reason


def test_state_of_a_model_that_changed_while_it_ran_is_not_stored() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    cache = build_cache(EXACT, engine, background=False)

    def change(*_: Any) -> None:
        engine.model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)

    Pipeline(engine, cache).answer(request(PROMPT), on_token=change)
    assert cache.store.stats().entries == 0


def test_one_weight_written_through_data_is_noticed_within_the_promised_uses_and_at_once_when_told() -> None:
    model, words = text_model("llama"), tokenizer()
    ids = words(PROMPT, return_tensors="pt")["input_ids"]
    for told in (True, False):
        records: list[Record] = []
        with dejakv.attach(model, words, on_record=records.append) as cache:
            ask(model, ids)
            cache.flush()
            model.model.layers[0].self_attn.k_proj.weight.data[7, 11] += 4.0
            if told:
                cache.weights_changed()
            for _ in range(1 if told else TURNS):
                ask(model, ids)
                cache.flush()
                if records[-1].method == "none":
                    break
            methods = [record.method for record in records[1:]]
            assert "none" in methods
            assert torch.equal(ask(model, ids), alone(model, ids))


@pytest.mark.parametrize("why", ["training mode", "autocast"])
def test_at_some_moments_a_call_goes_to_the_model(why: str) -> None:
    model, words, records = text_model("llama"), tokenizer(), list[Record]()
    ids = words(PROMPT, return_tensors="pt")["input_ids"]
    with dejakv.attach(model, words, on_record=records.append) as cache:
        ask(model, ids)
        cache.flush()
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            model.train(why == "training mode")
            assert torch.equal(ask(model, ids), alone(model, ids))
        assert records[-1].request_id == "untouched"
        assert why in records[-1].reason
        model.eval()
        ask(model, ids)
        assert records[-1].method == "exact"
