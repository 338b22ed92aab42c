"""PEFT adapters: whatever changes what they add to the model is another model."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
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


def rescaled(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 5 * value for name, value in module.scaling.items()}


def rescaled_in_place(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 5


def another_active(model: Any) -> None:
    model.set_adapter("two")


def off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def another_merged(model: Any) -> None:
    model.merge_adapter(["two"])


def merged_and_unmerged_scaled(model: Any) -> None:
    model.merge_adapter()
    rescaled(model)
    model.unmerge_adapter()


def weights_copied(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "lora_B.default" in name:
            weight.data.copy_(torch.full_like(weight, 0.7))


def loaded(model: Any) -> None:
    state = {name: value + 1 for name, value in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, state)


def deleted(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that another adapter becomes active
        model.delete_adapter("default")


CHANGES: list[Callable[[Any], None]] = [
    rescaled, rescaled_in_place, another_active, off, another_merged, merged_and_unmerged_scaled, weights_copied, loaded, deleted,
]  # fmt: skip
OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def inputs() -> dict[str, torch.Tensor]:
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def alone(model: Any) -> torch.Tensor:
    return type(model).generate(model, **inputs(), **OPTIONS)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_next_use_after_a_change_is_computed(change: Callable[[Any], None]) -> None:
    model = adapted()
    records: list[Record] = []
    with dejakv.attach(model, tokenizer(), on_record=records.append) as cache:
        before = model.generate(**inputs(), **OPTIONS)
        cache.flush()
        assert torch.equal(model.generate(**inputs(), **OPTIONS), before)
        change(model)
        assert torch.equal(model.generate(**inputs(), **OPTIONS), alone(model))
        assert [record.method for record in records] == ["none", "exact", "none"]


def test_merging_the_active_adapter_is_another_model_too() -> None:
    model = adapted()
    engine = TransformersEngine(model, tokenizer())
    seen = {engine.epoch}
    model.merge_adapter()
    seen.add(engine.weights_changed())
    with rescale_adapter_scale(model, 0.5):
        seen.add(engine.weights_changed())
    assert len(seen) == 3


def test_adapters_that_take_turns_find_their_own_state_again() -> None:
    model = adapted()
    records: list[Record] = []
    with dejakv.attach(model, tokenizer(), on_record=records.append) as cache:
        for _ in range(3):
            for name in ("default", "two"):
                model.set_adapter(name)
                assert torch.equal(model.generate(**inputs(), **OPTIONS), alone(model))
                cache.flush()
    assert [record.method for record in records] == ["none"] * 2 + ["exact"] * 4


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
