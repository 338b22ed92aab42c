"""State of other weights, and of another device, dtype, attention backend or block, is a miss, in one folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_harness import DOCS, EXTENSION, Output, recompute_all, running, tokens

A = tokens(300, 401)


class OtherBackend(CPUAttentionBackend):
    """The same kernels under another name."""


def test_state_of_another_device_dtype_backend_or_block_is_a_miss(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of server finds its own state and that of no other, and says in which arithmetic."""

    def asked(**options: Any) -> tuple[str, str]:
        with running(extra={"store_dir": str(tmp_path)}, enable_prefix_caching=False, **options) as engine:
            (first,) = engine.ask([A])
            engine.settle()
            (again,) = engine.ask([A])
        arithmetic = "bf16" if options.get("dtype") == "bfloat16" else "fp32"
        # Not bit for bit: on a CPU vLLM's kernels have no batch-invariant mode.
        assert [(one.told["arithmetic"], one.told["bitwise"]) for one in (first, again)] == [(arithmetic, False)] * 2
        return first.told["method"], again.told["method"]

    assert asked() == ("none", "exact")
    with monkeypatch.context() as other:
        where = f"{OtherBackend.__module__}.{OtherBackend.__qualname__}"
        other.setattr(type(current_platform), "get_attn_backend_cls", classmethod(lambda *_, **__: where))
        clear_selection()
        assert asked() == ("none", "exact")
    clear_selection()
    with monkeypatch.context() as other:
        other.setattr(type(current_platform), "get_device_name", classmethod(lambda *_: "another"))
        assert asked() == ("none", "exact")
    assert asked() == ("exact", "exact")
    assert asked(kv_cache_dtype="fp8") == ("none", "exact")
    assert asked() == ("exact", "exact")


def test_engines_of_other_weights_share_a_folder(tmp_path: Path) -> None:
    """Each finds its own state alone, whoever stored last, and the other's stays."""
    changed = tmp_path / "changed"
    shutil.copytree(DOCS, changed)
    weights = load_file(changed / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name] * 1.5
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    for model, method in ((DOCS, "none"), (changed, "none"), (DOCS, "exact")):
        with running(model, {"store_dir": str(tmp_path / "store")}) as engine:
            (truth,) = engine.ask([A], salt="truth", wish={"mode": "off", "no_store": True})
            (output,) = engine.ask([A])
            assert (output.told["method"], output.tokens) == (method, truth.tokens)
            engine.settle()


def clear_selection() -> None:
    """vLLM remembers which backend it selected."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def test_a_donor_that_is_longer_than_a_servers_context(tmp_path: Path) -> None:
    """Stored by a server that takes longer prompts: what this one can use of it is used, as a blend and as an exact prefix, which goes
    before a blend that has little in common with it."""
    passage, question = tokens(128, 101), tokens(24, 104)
    long = tokens(600, 301) + passage + tokens(100, 302)
    extra = {"store_dir": str(tmp_path), "modes": ["off", "exact", "blend"]}
    with running(extra=extra, worker_extension_cls=EXTENSION) as engine:
        engine.ask([long])
        engine.settle()
    prompts = [tokens(12, 303) + passage + question, long[:320] + question, long[:64] + tokens(400, 13)]
    wishes = [{"mode": mode, "no_store": True} for mode in ("blend", "exact", "blend")]
    with running(extra=extra, worker_extension_cls=EXTENSION, max_model_len=512) as engine:
        recompute_all()
        off = {"mode": "off", "no_store": True}
        truth = engine.ask(prompts, wish=off, salt="truth")
        asked: list[Output] = []
        for prompt, wish in zip(prompts, wishes, strict=True):
            engine.reset_prefix_cache()
            asked += engine.ask([prompt], wish=wish)
    assert [one.told["method"] for one in asked] == ["blend", "exact", "exact"]
    assert len({one.told["donor"] for one in asked}) == 1
    assert [one.computed for one in asked[1:]] == [len(prompts[1]) - 320, len(prompts[2]) - 64]
    assert [one.tokens for one in asked] == [one.tokens for one in truth]
