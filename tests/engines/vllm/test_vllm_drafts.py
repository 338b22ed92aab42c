"""Speculative decoding through a real engine: a model of its own, an EAGLE head and a layer of the model itself (MTP) draft tokens. Their
layers' state is stored and loaded with the model's, so that as many drafts are accepted behind a hit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_harness import DOCS, Engine, running, tokens

DRAFTS = 3
PROMPTS = [tokens(60, 91), tokens(133, 92)]


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for file in DOCS.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    return folder


def layer(prefix: str, config: dict[str, Any], random: torch.Generator, *, bias: bool) -> dict[str, torch.Tensor]:
    """Random weights of a decoder layer."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    weights = {
        f"{prefix}.{name}.weight": torch.randn(shape, generator=random) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}.{name}.weight"] = torch.ones(hidden)
    if bias:
        weights |= {
            f"{prefix}.self_attn.{name}_proj.bias": torch.zeros(size)
            for name, size in zip("qkv", (heads, kv, kv), strict=True)
        }
    return weights


def eagle_head(folder: Path) -> Path:
    """A head for docs-lm that mostly repeats what it is given."""
    config = json.loads((DOCS / "config.json").read_text()) | {"num_hidden_layers": 1}
    hidden, random = config["hidden_size"], torch.Generator().manual_seed(1)
    weights = layer("layers.0", config, random, bias=False)
    del weights["layers.0.input_layernorm.weight"]
    passed = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    weights["fc.weight"] = passed + 0.02 * torch.randn(hidden, 2 * hidden, generator=random)
    return write_model(folder, config, weights)


def mimo(folder: Path) -> Path:
    """MiMo, Qwen2 with a layer that drafts."""
    hidden, random = 128, torch.Generator().manual_seed(2)
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": hidden,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    weights = {f"model.{name}.weight": torch.ones(hidden) for name in ("norm",)}
    weights |= {
        name: torch.randn(512, hidden, generator=random) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    drafting = "model.mtp_layers.0"
    for prefix in ("model.layers.0", "model.layers.1", drafting):
        weights |= layer(prefix, config, random, bias=True)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{drafting}.{name}.weight"] = torch.ones(hidden)
    weights[f"{drafting}.input_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=random)
    return write_model(folder, config, weights)


def accepted(engine: Engine) -> float:
    return engine.metrics()["vllm:spec_decode_num_accepted_tokens"]


@pytest.mark.shows("exact", "generated", "drafts")
@pytest.mark.parametrize("name", ["draft_model", "eagle", "mtp"])
def test_hits_are_exact_and_drafts_are_accepted_as_before(name: str, tmp_path: Path) -> None:
    """Misses, hits and the next turns of chats, beside full computation in the same engine."""
    folder = mimo(tmp_path / "model") if name == "mtp" else DOCS
    drafting = {"draft_model": DOCS, "eagle": tmp_path / "head", "mtp": None}[name]
    if name == "eagle":
        eagle_head(tmp_path / "head")
    speculative = {"method": name, "num_speculative_tokens": 1 if name == "mtp" else DRAFTS}
    speculative |= {"model": str(drafting)} if drafting else {}
    off = {"mode": "off", "no_store": True}

    with running(folder, {"generated_text": "keep"}, speculative_config=speculative) as engine:
        full = engine.ask(PROMPTS, max_tokens=40, wish=off)
        counted = [accepted(engine)]
        for method in ("none", "exact"):
            engine.reset_prefix_cache()
            outputs = engine.ask(PROMPTS, max_tokens=40)
            assert [output.told["method"] for output in outputs] == [method] * len(PROMPTS)
            assert [output.tokens for output in outputs] == [output.tokens for output in full]
            counted.append(accepted(engine))
            engine.settle()
        assert counted[2] - counted[1] == counted[1] - counted[0] == counted[0]
        assert counted[0] or name == "mtp"

        turns = [[*prompt, *output.tokens, *tokens(9, 6)] for prompt, output in zip(PROMPTS, full, strict=True)]
        engine.reset_prefix_cache()
        second = engine.ask(turns, max_tokens=8)
        engine.reset_prefix_cache()
        assert [output.tokens for output in second] == [
            output.tokens for output in engine.ask(turns, max_tokens=8, wish=off)
        ]
        reused = [(len(prompt) + 39) // 32 * 32 for prompt in PROMPTS]
        assert [output.told["tokens_reused"] for output in second] == reused

        engine.settle()
        draft = engine.core.model_executor.driver_worker.worker.get_draft_model()
        next(parameter for parameter in draft.parameters() if parameter.numel()).data.add_(1)  # packed ones are empty
        engine.ask([tokens(60, 93)])
        engine.reset_prefix_cache()
        (output,) = engine.ask(PROMPTS[:1])
        assert output.told["reason"] == "the weights were changed without a reset"
