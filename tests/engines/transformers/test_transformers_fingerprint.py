"""Whatever changes what a model computes must change its epoch, and nothing else may."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import image_model, text_model, tokenizer

from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.watch import tokenizer_digest


def epoch(model: Any, words: Any = None, processor: Any = None) -> str:
    return TransformersEngine(model, words or tokenizer(), processor, check=False).epoch


def test_epoch_is_stable_and_32_hexadecimal_digits() -> None:
    one = epoch(text_model("llama"))
    assert one == epoch(text_model("llama"))
    assert len(one) == 32
    assert int(one, 16) >= 0


def test_epoch_survives_saving_and_loading(tmp_path: Path) -> None:
    model = text_model("qwen2")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    first = TransformersEngine.from_pretrained(str(tmp_path), dtype="fp32", device="cpu")
    assert first.epoch == TransformersEngine.from_pretrained(str(tmp_path), dtype="fp32", device="cpu").epoch


@pytest.mark.parametrize(
    "change",
    [
        "weight",
        "order",
        "dtype",
        "attention",
        "token",
        "template",
        "model",
        "config",
        "buffer",
        "hidden",
        "attribute",
        "tie",
    ],
)
def test_every_change_makes_another_epoch(change: str) -> None:
    before = epoch(text_model("llama"))
    model, words = text_model("llama"), tokenizer()
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        if change == "weight":
            weight[3, 5] += 1e-6
        elif change == "order":
            weight[[0, 1]] = weight[[1, 0]]
        elif change == "dtype":
            model = text_model("llama", torch.bfloat16)
        elif change == "attention":
            model = text_model("llama", attn="eager")
        elif change == "token":
            words.add_tokens(["newword"])
        elif change == "template":
            words.chat_template = "{{ messages[0]['content'] }}"
        elif change == "model":
            model = text_model("mistral")
        elif change == "config":
            model.config.rms_norm_eps = 1e-3
        elif change == "buffer":
            model.model.rotary_emb.inv_freq[3] *= 2  # not persistent: no checkpoint tells
        elif change == "hidden":
            model.model.rotary_emb.table = model.model.rotary_emb.inv_freq * 2  # no buffer either
        elif change == "attribute":
            model.model.layers[0].input_layernorm.variance_epsilon *= 10
        else:
            model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight
    assert epoch(model, words) != before


def test_where_a_model_was_loaded_from_and_how_it_decodes_do_not_count() -> None:
    model = text_model("llama")
    before = epoch(model)
    model.name_or_path = model.config._name_or_path = "elsewhere"
    model.generation_config.temperature = 0.3
    model.requires_grad_(False)
    assert epoch(model) == before


def test_another_process_finds_the_same_epoch(tmp_path: Path) -> None:
    model = text_model("gemma2")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from dejakv.engines.transformers import TransformersEngine as engine;"
        "print(engine.from_pretrained(sys.argv[1], dtype='fp32', device='cpu', check=False).epoch)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {TransformersEngine.from_pretrained(str(tmp_path), dtype="fp32", device="cpu").epoch}


def test_processor_settings_count() -> None:
    model, processor = image_model("qwen2_5_vl")
    before = epoch(model, processor.tokenizer, processor)
    processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 1024}
    assert epoch(model, processor.tokenizer, processor) != before


def test_dictionaries_are_not_told_apart_by_the_order_of_their_words() -> None:
    assert tokenizer_digest(tokenizer()) == tokenizer_digest(tokenizer())
    assert tokenizer_digest(None) == ""
