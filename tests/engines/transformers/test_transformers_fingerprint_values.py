"""Values, code and settings around the weights: what makes another epoch, and what makes none at all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_transformers import PLACEHOLDER, image_model, picture, request, text_model, tokenizer

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"
EXACT = SemanticCacheConfig(semantic_text=False)


VALUES: dict[str, Callable[[Any], object]] = {
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "inside the configuration": lambda model: model.config.rope_parameters.update(rope_theta=77.0),
    "new in the configuration": lambda model: setattr(model.config, "window", 3),
    "list": lambda model: model.model.layers[0].shares.append(3),
    "dictionary": lambda model: model.model.layers[0].scales.update(one=2.0),
    "list of objects": lambda model: model.model.layers[0].holders.append(SimpleNamespace()),
    "object in a list": lambda model: setattr(model.model.layers[0].holders[0], "strength", 3),
    "object": lambda model: setattr(model.model.layers[0].holder, "strength", 2),
    "tensor": lambda model: model.model.layers[0].offset.add_(1),
    "new attribute": lambda model: setattr(model.model.layers[0], "mode", "fast"),
    "attribute gone": lambda model: delattr(model.model.layers[0], "shares"),
    "new parameter": lambda model: model.model.layers[0].register_parameter("more", torch.nn.Parameter(torch.ones(2))),
    "new buffer": lambda model: model.model.layers[0].register_buffer("table", torch.ones(2), persistent=False),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_anywhere_makes_another_epoch(name: str) -> None:
    model = text_model("llama")
    layer = model.model.layers[0]
    layer.holders = [SimpleNamespace(strength=1)]
    layer.shares, layer.scales, layer.offset = [1, 2], {"one": 1.0}, torch.ones(3)
    layer.holder = SimpleNamespace(strength=1)
    engine = TransformersEngine(model, tokenizer())
    prepared, before = engine.prepare(request(PROMPT)), engine.epoch
    engine.run(prepared)
    assert engine.epoch == before
    VALUES[name](model)
    engine.run(prepared)
    assert engine.epoch not in (before, "")
    assert engine.epoch == TransformersEngine(model, tokenizer()).epoch


def test_the_precision_of_products_counts() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    prepared, before = engine.prepare(request(PROMPT)), engine.epoch
    torch.set_float32_matmul_precision("medium")
    try:
        engine.run(prepared)
        assert engine.epoch not in (before, "")
    finally:
        torch.set_float32_matmul_precision("highest")
    engine.run(prepared)
    assert engine.epoch == before


def test_a_class_whose_forward_was_replaced_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    kind = type(engine.model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * own(self, x))
    engine.run(engine.prepare(request(PROMPT)))
    assert engine.epoch == ""
    assert "LlamaMLP.forward runs" in engine.unidentified


def test_a_function_deep_inside_a_library_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    engine = TransformersEngine(text_model("llama"), tokenizer())
    before = engine.epoch
    monkeypatch.setattr(masking_utils, "and_masks", lambda *_: None)
    assert engine.weights_changed() == before, "it is noticed now: say so in docs/exactness.md"


def test_a_hook_for_the_whole_process_counts_too() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: out)
    try:
        engine.run(engine.prepare(request(PROMPT)))
        assert engine.epoch == ""
        assert "forward hook" in engine.unidentified
    finally:
        handle.remove()
    engine.run(engine.prepare(request(PROMPT)))
    assert engine.epoch


def test_weights_that_are_not_in_memory_are_not_identified() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    engine.model.lm_head.weight = torch.nn.Parameter(engine.model.lm_head.weight.to("meta"), requires_grad=False)
    assert engine.weights_changed() == ""
    assert "offloaded" in engine.unidentified


def test_the_processor_counts_for_pictures_already_seen() -> None:
    model, processor = image_model("qwen2_5_vl")
    engine = TransformersEngine(model, processor.tokenizer, processor, encoder_cache=VisualKVCache())
    pipeline = Pipeline(engine, build_cache(EXACT, engine, background=False))
    asked = request(f"how many {PLACEHOLDER['qwen2_5_vl']} cubes are there left of it", (picture(1, 64, 64),))
    first = pipeline.answer(asked)
    assert pipeline.answer(asked).record.method == "exact"
    processor.image_processor.image_mean = [0.9, 0.1, 0.9]
    processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 32 * 32}
    changed = pipeline.answer(asked)
    assert changed.record.method != "exact"
    assert changed.record.encoder_runs == 1
    fresh = TransformersEngine(model, processor.tokenizer, processor)
    assert changed.token_ids == Pipeline(fresh).answer(asked).token_ids
    assert changed.record.prompt_tokens <= first.record.prompt_tokens
