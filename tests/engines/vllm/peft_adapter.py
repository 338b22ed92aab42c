"""Random LoRA adapters for docs-lm in PEFT's format, strong enough that each answers unlike the base model and the others."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dejakv.models import path

RANK = 8
LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 3, "max_cpu_loras": 4}
"""Options of an engine. Two adapters leave the last slot empty, whose weights the CPU kernels add to base-model rows."""


def write_adapter(folder: Path, seed: int) -> Path:
    """A whole adapter, on every projection of every layer, in `folder`."""
    shape = json.loads((path("docs-lm") / "config.json").read_text())
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, mlp),
        "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }
    random = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (wide, out) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, wide, generator=random) / wide**0.5
            weights[f"{module}.lora_B.weight"] = torch.randn(out, RANK, generator=random) / RANK**0.5
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": [name.split(".")[1] for name in sizes],
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter(name: str, number: int, folder: Path, **options: Any) -> Any:
    """A `LoRARequest`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder), **options)
