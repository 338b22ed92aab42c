"""Random models of a few layers, in a folder, with the tokenizer of docs-lm."""

import shutil
from pathlib import Path
from typing import Any

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
from vllm_harness import DOCS

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
