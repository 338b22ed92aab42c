"""Tiny random models of every architecture that blending is tried on."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 512, "factor": 1.0,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama+yarn": {"rope_parameters": YARN},
    "llama+dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    "mistral": {"sliding_window": None},
    "mistral+window": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3+longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 512},
    "gemma": HEAD,
    "gemma2": {**HEAD, **WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**HEAD, **WINDOWS},
    "cohere": {},
    "cohere2": WINDOWS,
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "olmo3": WINDOWS,
    "glm": HEAD,
    "stablelm": {"partial_rotary_factor": 0.5},
    "mixtral": EXPERTS,
    "gpt_oss": {**HEAD, **EXPERTS, **WINDOWS, "rope_parameters": YARN, "attn": "eager"},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "llama+eager": {"attn": "eager"},
}


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with seeded random weights, in evaluation mode."""
    settings = {**BASE, **ARCHITECTURES.get(name, {}), **changes}
    attention = settings.pop("attn", "sdpa")
    torch.manual_seed(5)
    config = CONFIG_MAPPING[name.split("+")[0]](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():  # weights of .02 make states so alike that a wrong one would hardly show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model
