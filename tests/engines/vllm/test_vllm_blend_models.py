"""Blends of models that are not built like Llama: tiny ones with random weights, made here."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm_harness import BLENDING, DOCS, EXTENSION, changed, recompute_all, running, tokens, worker_side

from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ModelError
from dejakv.experiments.vllm_engine import VLLMEngine

A = tokens(301, 11)
MOVED = tokens(20, 12) + A[140:290] + A[:130] + A[290:]
LOW, HIGH = ([token % 200 + offset for token in tokens(600, 14)] for offset in (8, 208))
LONG_DONOR = LOW[:300] + HIGH
PIECE = LOW[400:490] + LOW[20:290] + LOW[490:550]
SIZE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10_000.0}
MODELS: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(**SIZE),  # norms of queries and keys
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZE, **EXPERTS, decoder_sparse_step=1, norm_topk_prob=True),
    "phi3": transformers.Phi3Config(**SIZE, pad_token_id=0),  # one matrix for all inputs
    "stablelm": transformers.StableLmConfig(**SIZE, partial_rotary_factor=0.5),  # half of each head rotated
    "qwen3+yarn": transformers.Qwen3Config(**SIZE, rope_parameters=LONG),
}


def built(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DOCS / file, folder / file)
    return folder


@pytest.mark.shows("blend")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_builds_are_blended(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row computed the answer is that of full computation. With fewer, the rows that stay are the donor's, moved; of a donor
    that the model is checked with, what is not copied is not converted either."""
    folder = built(tmp_path / "model", MODELS[name])
    with running(folder, BLENDING, worker_extension_cls=EXTENSION) as engine:
        exact = {"mode": "exact", "no_store": True}
        (truth,) = engine.ask([MOVED], salt="truth", wish=exact, max_tokens=8)
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        blender = worker_side().blend_runner
        recompute_all()
        wish = {"mode": "blend", "no_store": True}
        (every,) = engine.ask([MOVED], wish=wish, max_tokens=8)
        assert every.told["method"] == "blend", every.told["reason"]
        assert every.told["tokens_recomputed"] == len(MOVED) - 16
        assert every.tokens == truth.tokens
        engine.reset_prefix_cache()  # or the prompt is computed in full, since what is there was blended
        blender.config = replace(blender.config, share=0.3)
        (some,) = engine.ask([MOVED], wish=wish, max_tokens=8)
        assert some.told["method"] == "blend", some.told["reason"]
        assert 0 < some.told["tokens_recomputed"] < 0.4 * len(MOVED)
        assert blender.model_check.checked > 0
        converted, entries = list[int](), PagedKV.entries

        def counted(self: PagedKV, pages: torch.Tensor, count: int) -> torch.Tensor:
            converted.append(count)
            return entries(self, pages, count)

        engine.ask([LONG_DONOR])
        engine.settle()
        monkeypatch.setattr(PagedKV, "entries", counted)
        before = blender.model_check.checked
        (piece,) = engine.ask([PIECE], wish=wish)
        assert piece.told["method"] == "blend", piece.told["reason"]
        assert blender.model_check.checked > before
        assert len(PIECE) < sum(converted) < len(LONG_DONOR) - 256
        (again,) = engine.ask([changed(MOVED, 0.1, 13)], salt="truth", wish=exact)
        assert again.told["method"] == "none"


@pytest.mark.shows("blend", model="gpt2", told="refused")
def test_a_model_without_rotary_positions_is_refused_at_start(tmp_path: Path) -> None:
    """With the remedy, and so that another engine may start afterwards."""
    size = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    folder = built(tmp_path, transformers.GPT2Config(**size))
    with pytest.raises(ModelError, match=r"no rotary table.*--reuse exact or adopt"):
        VLLMEngine.from_pretrained(str(folder), settings=ConnectorSettings(modes=("off", "exact", "blend")))
    assert not has_kv_transfer_group()
