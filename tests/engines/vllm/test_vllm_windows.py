"""Models that mix sliding windows with full attention: vLLM keeps all of their blocks, so a hit is exact."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from vllm_harness import DOCS, EXTENSION, running, tokens

from dejakv.errors import ConfigError

WINDOW = 64
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "sliding_window": WINDOW, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"query_pre_attn_scalar": 32, "layer_types": KINDS}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"query_pre_attn_scalar": 32, "layer_types": KINDS}),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"layer_types": KINDS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {}),
}
PROMPTS = [tokens(600 + 13 * number, 50 + number) for number in range(6)]


def model(name: str, folder: Path) -> Path:
    """A random one in a folder, with the tokenizer of docs-lm."""
    config, kind, more = MODELS[name]
    torch.manual_seed(0)
    kind(config(**SIZES, **more)).float().save_pretrained(folder)
    for file in DOCS.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_hits_are_exact(name: str, tmp_path: Path) -> None:
    """Prompts of ten windows. vLLM turns its hybrid allocator off by itself."""
    folder = model(name, tmp_path)
    with running(folder, connector=False) as engine:
        plain = [output.tokens for output in engine.ask(PROMPTS, max_tokens=16)]
    with running(folder) as engine:
        engine.ask(PROMPTS, max_tokens=16)
        engine.settle()
        engine.reset_prefix_cache()
        again = engine.ask(PROMPTS, max_tokens=16)
        assert engine.metrics()["vllm:dejakv_loads"] == len(PROMPTS)
    assert [(output.told["method"], output.computed) for output in again] == [("exact", 1)] * len(PROMPTS)
    assert [output.tokens for output in again] == plain


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Windows in every layer drop blocks whatever the allocator; blends of windows were not shown."""
    with pytest.raises(ConfigError, match="sliding windows in every layer"), running(model("mistral", tmp_path / "m")):
        pass
    blend = {"modes": ["exact", "blend"]}
    with (
        pytest.raises(ConfigError, match="mode blend with sliding windows"),
        running(model("gemma2", tmp_path / "g"), blend, worker_extension_cls=EXTENSION),
    ):
        pass
