"""smollm2-135m as it was fetched: the weights that its name stands for, its tokenizer, and answers in words."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dejakv.models import RECIPES, fetched, load, resolve, tokenizer_folder
from dejakv.models.manifest import digest


def test_it_is_whole_and_keeps_its_licence(smollm2: Path) -> None:
    assert resolve("smollm2-135m") == smollm2
    (item,) = (item for item in fetched() if item.name == "smollm2-135m")
    assert (item.state, item.reason) == ("fetched", "")
    assert digest(smollm2 / "model.safetensors") == RECIPES["smollm2-135m"].weights_sha256
    assert "Apache License" in (smollm2 / "LICENSE").read_text()
    size = sum(file.stat().st_size for file in smollm2.iterdir())
    assert abs(size - item.nbytes) < 10_000
    assert not json.loads((smollm2 / "config.json").read_text()).get("quantization_config")


def test_it_answers(smollm2: Path) -> None:
    model, tokenizer = load("smollm2-135m", dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def test_the_tokenizer_ships_with_the_package() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2-135m"))
    text = "Naïve café, 12 × 345 = 4140.\n    x = [10, 20]  # 数字\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokens = tokenizer.tokenize("    10 and 2024")
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("102024")  # `smollm`: single digits
    assert tokenizer.tokenize("<|im_start|>user") == ["<|im_start|>", "user"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.vocab_size == 49_152
