"""PEFT adapters: whatever changes what they add to the model is another model."""

from pathlib import Path
from typing import Any

import peft
import torch
from peft.helpers import rescale_adapter_scale
from tiny_transformers import text_model, tokenizer

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.records import Record

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"


def adapted(alpha: int = 16) -> Any:
    """A tiny model with two adapters, the first one active; the same weights whatever `alpha` is."""
    config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(text_model("llama"), config).eval()
    torch.manual_seed(2)
    model.add_adapter("two", config)
    return model


OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def inputs() -> dict[str, torch.Tensor]:
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def alone(model: Any) -> torch.Tensor:
    return type(model).generate(model, **inputs(), **OPTIONS)


def test_merging_the_active_adapter_is_another_model_too() -> None:
    model = adapted()
    engine = TransformersEngine(model, tokenizer())
    seen = {engine.epoch}
    model.merge_adapter()
    seen.add(engine.weights_changed())
    with rescale_adapter_scale(model, 0.5):
        seen.add(engine.weights_changed())
    assert len(seen) == 3


def test_after_a_restart_the_same_weights_with_another_alpha_find_nothing(tmp_path: Path) -> None:
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    records: list[Record] = []
    for alpha in (16, 64, 16):
        model = adapted(alpha)
        with dejakv.attach(model, tokenizer(), config, on_record=records.append):
            assert torch.equal(model.generate(**inputs(), **OPTIONS), alone(model))
    assert [record.method for record in records] == ["none", "none", "exact"]


def test_adapters_named_for_each_row_go_to_the_model() -> None:
    model = adapted()
    records: list[Record] = []
    with dejakv.attach(model, tokenizer(), on_record=records.append):
        got = model.generate(**inputs(), **OPTIONS, adapter_names=["two"])
    assert records[-1].reason == "adapter_names is given"
    assert torch.equal(got, type(model).generate(model, **inputs(), **OPTIONS, adapter_names=["two"]))
