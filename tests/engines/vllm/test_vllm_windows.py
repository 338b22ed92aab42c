"""Shapes of caches: sliding windows, beside full attention in groups of their own or alone, latent rows (MLA), and fp8. A hit is exact, since
pages come back byte for byte."""

import shutil
from dataclasses import replace
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
from vllm_harness import BLENDING, DOCS, EXTENSION, recompute_all, running, tokens, worker_side

from dejakv.engines.tensors import tensor_view
from dejakv.engines.vllm.blend.model import _add_weights, _outside
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
    # Where the processor has AMX, vLLM would take a kernel that refuses float32.
    options |= {"attention_backend": "CPU_MLA"} if name == "deepseek" else {"max_num_batched_tokens": 160}
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
    assert whole == (name == "deepseek")
    if whole:
        assert "computes a single token behind stored ones" in parted.told["reason"]
    else:
        assert parted.told["tokens_reused"] == 300


A = tokens(301, 11)
MOVED = tokens(20, 12) + A[140:290] + A[:130] + A[290:]
KEPT: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True, "worker_extension_cls": EXTENSION}


@pytest.mark.shows("blend")
@pytest.mark.parametrize("name", HYBRID)
def test_blends_where_blocks_outside_of_windows_are_kept(name: str, tmp_path: Path) -> None:
    """Then all layers are one group, and each attends to its own window. With every row computed, all rows and the answer are those of full
    computation; the question's weights end at the windows, too."""
    with running(tiny_model(name, tmp_path), BLENDING, **KEPT) as engine:
        (truth,) = engine.ask([MOVED], salt="truth", wish={"mode": "exact"}, max_tokens=8)
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        worker, blended = worker_side(), list[torch.Tensor]()
        blender = worker.blend_runner
        recompute_all()
        advance = blender.advance

        def advance_and_copy(blends: Any, room: int) -> int:
            computed = advance(blends, room)
            blended.append(worker.paged.gather(blends[0].block_ids, blends[0].draft.plan.end))
            return computed

        blender.advance = advance_and_copy
        wish = {"mode": "blend", "no_store": True}
        (every,) = engine.ask([MOVED], wish=wish, max_tokens=8)
        blender.advance = advance
        assert every.told["method"] == "blend", every.told["reason"]
        assert every.told["tokens_recomputed"] == len(MOVED) - 16
        assert every.tokens == truth.tokens

        (meta,) = [meta for meta in worker.store.metas() if list(meta.token_ids) == MOVED]
        rows = torch.cat(
            [
                worker.paged.entries(tensor_view(part.tensor)[0, 0, 0], part.stop - part.first)
                for part in worker.store.get_parts(meta.id, None)
            ],
            dim=3,
        )
        torch.testing.assert_close(blended[-1], rows[:, :, :, : blended[-1].shape[3]], rtol=1e-3, atol=1e-4)

        engine.reset_prefix_cache()
        blender.config = replace(blender.config, share=0.3)
        (some,) = engine.ask([MOVED], wish=wish, max_tokens=8)
        assert some.told["method"] == "blend", some.told["reason"]
        assert 0 < some.told["tokens_recomputed"] < 0.5 * len(MOVED)
        assert blender.model_check.checked > 0


def test_a_question_has_no_weight_outside_of_its_window() -> None:
    """Three rows at the end of 20 tokens, which see five tokens each: the first of them reaches back to token 13."""
    torch.manual_seed(0)
    later, weights = torch.ones(3, 3, dtype=torch.bool).triu(1), torch.zeros(20)
    _add_weights(torch.randn(3, 4, 8), torch.randn(2, 20, 8), later, _outside(5, 3, 20), 1.0, 0.0, weights)
    assert weights.nonzero().flatten().tolist() == list(range(13, 20))
    assert weights.sum().item() == pytest.approx(3 * 4)


@pytest.mark.shows("blend", told="refused")
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("mistral_window", KEPT, r"sliding windows whose blocks are freed .* have no block"),
        ("deepseek", {"attention_backend": "CPU_MLA"}, r"MLA on a CPU without AMX .* attends to nothing in the cache"),
    ],
)
def test_blends_are_refused_at_start(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Where all layers have windows, vLLM frees blocks whatever it is told; and latent attention there computes no rows among others."""
    with (
        pytest.raises(ConfigError, match=f"mode blend with {reason}"),
        running(tiny_model(name, tmp_path), BLENDING, **options),
    ):
        pass


def test_blends_of_windows_name_the_option(tmp_path: Path) -> None:
    """Without it vLLM frees blocks outside of windows, and a blend would recompute rows there."""
    with (
        pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager keeps all blocks"),
        running(tiny_model("gemma2", tmp_path), BLENDING, worker_extension_cls=EXTENSION),
    ):
        pass
