"""Whatever changes what a model computes must change its epoch, and nothing else may."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import image_model, text_model, tokenizer

from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.fingerprint import folder_epoch, tokenizer_digest, weights_digest
from dejakv.errors import ModelError


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


@pytest.mark.parametrize("change", ["weight", "order", "dtype", "attention", "token", "template", "model", "layer"])
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
        else:
            model.config.rms_norm_eps = 1e-3
    assert epoch(model, words) != before


def test_processor_settings_count() -> None:
    model, processor = image_model("qwen2_5_vl")
    before = epoch(model, processor.tokenizer, processor)
    processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 1024}
    assert epoch(model, processor.tokenizer, processor) != before


def test_large_models_are_sampled_over_every_tensor_and_fast() -> None:
    tensors = {f"layer{index}": torch.zeros(2**20) for index in range(40)}
    began = time.perf_counter()
    before = weights_digest(tensors.items(), whole_bytes=1)
    assert time.perf_counter() - began < 1.0
    for index in (0, 17, 39):
        changed = {**tensors, f"layer{index}": tensors[f"layer{index}"] + 1}
        assert weights_digest(changed.items(), whole_bytes=1) != before
    assert weights_digest(tensors.items()) != weights_digest({**tensors, "more": torch.zeros(1)}.items())
    assert weights_digest({"a": torch.zeros(4)}.items()) != weights_digest({"a": torch.zeros(2, 2)}.items())


def test_dictionaries_are_not_told_apart_by_the_order_of_their_words() -> None:
    assert tokenizer_digest(tokenizer()) == tokenizer_digest(tokenizer())
    assert tokenizer_digest(None) == ""


def folder(path: Path, gib: int) -> Path:
    """A model folder with one sparse file of weights."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [gib * 2**29], "data_offsets": [0, gib * 2**30]}}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + gib * 2**30)
    return path


def test_a_folder_of_14_gb_is_fingerprinted_in_under_a_second(tmp_path: Path) -> None:
    big = folder(tmp_path / "big", 14)
    began = time.perf_counter()
    before = folder_epoch(big)
    assert time.perf_counter() - began < 1.0
    assert before == folder_epoch(big)
    with (big / "model.safetensors").open("r+b") as file:
        file.seek(9_000_000_000)
        file.write(b"changed")
    assert folder_epoch(big) != before


def test_small_folders_count_with_every_byte_whatever_the_time_says(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text("{}")
    (small / "model.safetensors").write_bytes(bytes(100_000))
    before = folder_epoch(small)
    os.utime(small / "model.safetensors", (1, 1))
    (small / ".cache").mkdir()
    (small / ".cache" / "lock").write_text("x")
    assert folder_epoch(small) == before
    data = bytearray(100_000)
    data[54_321] = 1
    (small / "model.safetensors").write_bytes(data)
    changed = folder_epoch(small)
    assert changed != before
    (small / "adapter.json").write_text("{}")
    assert folder_epoch(small) not in (before, changed)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json.*hub id"):
        folder_epoch(tmp_path)
