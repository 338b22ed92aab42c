"""Shapes of caches: sliding windows, beside full attention in groups of their own or alone, latent rows (MLA), and fp8. A hit is exact, since
pages come back byte for byte."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
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

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64, "max_position_embeddings": 1024,
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
    "mistral_window": (MistralConfig, MistralForCausalLM, {}),
    "deepseek": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            "head_dim": 64, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,
            "v_head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip


def tiny_model(name: str, folder: Path) -> Path:
    """Saves the model, and returns its folder."""
    config, kind, more = MODELS[name]
    torch.manual_seed(0)
    kind(config(**SIZES | more)).float().save_pretrained(folder)
    for file in DOCS.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    return folder


HYBRID = ("gemma2", "gemma3", "gpt-oss")
PROMPTS = [tokens(600 + 13 * number, 50 + number) for number in range(4)]


PART = PROMPTS[0][:300] + tokens(20, 9)


@pytest.mark.shows("exact")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "mistral_window", "deepseek", "fp8"])
def test_hits_are_exact(name: str, tmp_path: Path) -> None:
    """Prompts of ten windows, computed in several steps where vLLM can. While they are, blocks outside of windows are used for others."""
    folder = DOCS if name == "fp8" else tiny_model(name, tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8"} if name == "fp8" else {}
    options |= {} if name == "deepseek" else {"max_num_batched_tokens": 160}
    with running(folder, connector=False, **options) as engine:
        *plain, part = (engine.ask([prompt], max_tokens=6)[0].tokens for prompt in [*PROMPTS, PART])
    with running(folder, **options) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == (2 if name in HYBRID else 1)
        engine.ask(PROMPTS, max_tokens=6)
        engine.settle()
        engine.llm.reset_prefix_cache()  # False where vLLM has none: it does so for MLA on a CPU
        again = [engine.ask([prompt], max_tokens=6)[0] for prompt in PROMPTS]
        assert engine.metrics()["vllm:dejakv_loads"] == len(PROMPTS)
        engine.llm.reset_prefix_cache()
        (parted,) = engine.ask([PART], max_tokens=6)
        whole = engine.connector.scheduler_side.whole_only
    assert [(output.told["method"], output.computed) for output in again] == [("exact", 1)] * len(PROMPTS)
    assert [output.tokens for output in again] == plain
    assert parted.tokens == part
    assert not whole or name == "deepseek"
    if whole:  # a processor without AMX
        assert "computes a single token behind stored ones" in parted.told["reason"]
    else:
        assert parted.told["tokens_reused"] == 300


@pytest.mark.shows("blend", model="gemma2", told="refused")
def test_blends_of_windows_are_refused(tmp_path: Path) -> None:
    """They were not shown."""
    blend = {"modes": ["exact", "blend"]}
    with (
        pytest.raises(ConfigError, match="mode blend with sliding windows"),
        running(tiny_model("gemma2", tmp_path / "g"), blend, worker_extension_cls=EXTENSION),
    ):
        pass
