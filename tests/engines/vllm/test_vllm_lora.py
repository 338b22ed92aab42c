"""LoRA through a real engine: adapters and the base model never share state, and each finds its own again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_harness import BLENDING, EXTENSION, changed, recompute_all, running, tokens, worker_side

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


A = tokens(301, 61)
NEAR = changed(A, 0.1, 62)
OTHER = tokens(301, 63)
NO_BLEND = "blend is not for requests with a LoRA adapter"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three adapters; `other` lies in another folder than the one it is going to replace."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(("one", "two", "other"))}


@pytest.fixture(scope="module")
def truths(folders):
    """What each adapter answers with the connector off, prefix caching included: `truths[adapter][prompt]`."""
    with running(connector=False, **LORA) as engine:
        found = {}
        for number, name in enumerate((None, *folders)):
            lora = name and adapter(name, number, folders[name])
            answers = engine.ask([A, NEAR, OTHER], lora=lora)
            found[name] = {"A": answers[0].tokens, "NEAR": answers[1].tokens, "OTHER": answers[2].tokens}
    for prompt in ("A", "NEAR", "OTHER"):
        assert len({found[name][prompt] for name in found}) == 4  # or equal answers would prove nothing
    return found


@pytest.fixture
def loras(folders):
    return {None: None, "one": adapter("one", 1, folders["one"]), "two": adapter("two", 2, folders["two"])}


def _ask(engine, prompt, lora, **options):
    (output,) = engine.ask([prompt], lora=lora, **options)
    return output


@pytest.mark.shows("exact", "lora", model="docs-lm")
def test_adapters_never_share_and_find_their_own(tmp_path, loras, truths, monkeypatch):
    """Whoever stored first, each of the three misses once and hits from then on, after a restart too."""
    store = {"store_dir": str(tmp_path)}
    with running(extra=store, **LORA) as engine:
        for name, lora in loras.items():
            engine.reset_prefix_cache()
            first = _ask(engine, A, lora)
            engine.settle()
            assert (name, first.told["method"], first.cached) == (name, "none", 0)
            assert first.tokens == truths[name]["A"]
        assert len({meta.epoch for meta in worker_side().store.metas() if list(meta.token_ids) == A}) == 3
        for name, lora in loras.items():
            engine.reset_prefix_cache()
            again = _ask(engine, A, lora)
            assert (name, again.told["method"]) == (name, "exact")
            assert again.computed <= 32
            assert again.tokens == truths[name]["A"]
        engine.reset_prefix_cache()
        mixed = engine.ask([A, A, A, A], lora=[loras["one"], None, loras["two"], None])  # in one batch
        assert [output.tokens for output in mixed] == [truths[name]["A"] for name in ("one", None, "two", None)]
        assert all(output.computed <= 32 for output in mixed)
        engine.reset_prefix_cache()
        assert _ask(engine, A, loras["one"], salt="tenant", wish={"no_store": True}).cached == 0
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")  # clients may load other weights behind an adapter's id
    with running(extra=store, **LORA) as engine:
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in _ask(engine, A, loras["one"]).told["reason"]
        assert _ask(engine, A, None).told["method"] == "exact"
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    renumbered = {None: None, "one": adapter("one", 7, loras["one"].lora_path), "two": loras["two"]}
    with running(extra=store, **LORA) as engine:  # ids are given anew in another order: weights count, not ids
        for name, lora in renumbered.items():
            after = _ask(engine, A, lora)
            assert (name, after.told["method"]) == (name, "exact")
            assert after.computed <= 32
            assert after.tokens == truths[name]["A"]


def test_weights_that_are_not_proven_are_not_reused(tmp_path, folders, truths):
    """An id that stands for two adapters, and a load in place: answered, not reused, not stored; the base model is."""
    with running(extra={"store_dir": str(tmp_path)}, **LORA) as engine:
        assert _ask(engine, A, adapter("one", 1, folders["one"])).tokens == truths["one"]["A"]
        engine.settle()
        engine.reset_prefix_cache()
        mistaken = _ask(engine, OTHER, adapter("two", 1, folders["two"]))
        assert "has stood for two adapters" in mistaken.told["reason"]
        assert mistaken.tokens == truths["one"]["OTHER"]  # vLLM goes by the id: these are `one`'s
        for victim in (adapter("one", 1, folders["one"]), adapter("two", 2, folders["two"])):
            refused = _ask(engine, A, victim)
            assert "has stood for two adapters" in refused.told["reason"]
        engine.reset_prefix_cache()
        replaced = _ask(engine, A, adapter("other", 3, folders["other"], load_inplace=True))
        assert "loaded in place" in replaced.told["reason"]
        assert replaced.tokens == truths["other"]["A"]
        assert "loaded in place" in _ask(engine, A, adapter("other", 3, folders["other"])).told["reason"]
        engine.settle()
        adapted = [meta for meta in worker_side().store.metas() if list(meta.token_ids) in (A, OTHER)]
        assert len(adapted) == 1  # the first request's, from before the mistake
        _ask(engine, A, None)
        engine.settle()
        engine.reset_prefix_cache()
        assert _ask(engine, A, None).told["method"] == "exact"


def test_base_state_that_an_adapter_leaked_into_is_not_stored(tmp_path, loras, truths):
    """vLLM's CPU kernels give base-model rows the last slot's adapter when a step has both. Stored, that would outlive the
    process."""
    store = {"store_dir": str(tmp_path)}
    with running(extra=store, **LORA | {"max_loras": 1}) as engine:
        assert _ask(engine, A, None).tokens == truths[None]["A"]  # alone: right, and stored
        engine.settle()
        # The adapter's prompt is too short to be looked up: it answers by the time that the other is computed.
        _, leaked = engine.ask([[9] * 8, OTHER], lora=[loras["one"], None], max_tokens=60)
        assert leaked.tokens[:6] != truths[None]["OTHER"]  # vLLM's own: the connector has no part in it
        _ask(engine, [*OTHER, *A[:32]], None)  # begins with vLLM's own wrong blocks
        _ask(engine, A, loras["one"])
        engine.settle()
    with running(extra=store, **LORA) as engine:
        assert _ask(engine, A, None).told["method"] == "exact"
        assert _ask(engine, A, loras["one"]).told["method"] == "exact"
        after = _ask(engine, OTHER, None)
    assert after.told["method"] == "none"
    assert after.tokens == truths[None]["OTHER"]


def test_blend_beside_adapters(tmp_path, loras, truths):
    """An adapter's request is not blended, and a base request that is does not touch it, nor it the blend's rows."""
    extra = {**BLENDING, "store_dir": str(tmp_path)}
    with running(extra=extra, worker_extension_cls=EXTENSION, **LORA) as engine:
        for lora in loras.values():
            _ask(engine, A, lora)
        engine.settle()
        engine.reset_prefix_cache()
        recompute_all()  # equal to exact unless an adapter got in
        wish = {"mode": "blend", "no_store": True}
        beside = engine.ask([OTHER, NEAR], lora=[loras["one"], None], wish=[None, wish])
        assert beside[1].told["approximate"]
        assert beside[1].tokens == truths[None]["NEAR"]
        assert beside[0].tokens == truths["one"]["OTHER"]
        for name in ("one", "two"):
            for method in ("none", "exact"):  # computed, then from its own store
                kept = _ask(engine, NEAR, loras[name], wish={"mode": "blend"})
                engine.settle()
                engine.reset_prefix_cache()
                assert (kept.told["method"], kept.tokens) == (method, truths[name]["NEAR"])
                assert method == "exact" or kept.told["reason"] == NO_BLEND
