"""Exact reuse through a real engine: what was computed once is not computed again, and nothing else changes."""

import shutil

from safetensors.torch import load_file, save_file
from vllm_harness import DOCS, EXTENSION, running, tokens, worker_side

A = tokens(501, 1)


def test_exact_hit_after_restart(tmp_path):
    """The answer equals the uncached one, and at most one block of the prompt is computed."""
    with running(connector=False) as engine:
        (truth,) = engine.ask([A])
    assert truth.cached == 0
    store = {"store_dir": str(tmp_path / "store")}
    with running(extra=store) as engine:
        (first,) = engine.ask([A])
        engine.settle()
        assert first.tokens == truth.tokens
        assert first.told["method"] == "none"
        engine.reset_prefix_cache()
        (again,) = engine.ask([A])
        assert again.tokens == truth.tokens
        assert again.computed <= 32
        assert worker_side().paged.reader.__name__ == "read_transposed"
    with running(extra=store) as engine:
        (after,) = engine.ask([A])
        longer = A + tokens(40, 2)
        (extended,) = engine.ask([longer], wish={"no_store": True})
        engine.reset_prefix_cache()
        (prefix,) = engine.ask([longer])
    assert after.tokens == truth.tokens
    assert after.computed <= 32
    assert after.told["method"] == "exact"
    assert after.told["level"] == "exact_text"
    assert after.told["tokens_reused"] == len(A) - 1
    assert prefix.tokens == extended.tokens
    assert prefix.told["level"] == "prefix"
    assert prefix.told["tokens_reused"] == len(A)


def test_second_sight():
    """With second_sight a prompt is stored when it comes again, in a store in memory too."""
    with running(extra={"second_sight": True}) as engine:
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        assert not list(worker_side().store.metas())
        (second,) = engine.ask([A])
        assert second.told["method"] == "none", second.told
        engine.settle()
        engine.reset_prefix_cache()
        (third,) = engine.ask([A])
        assert third.told["level"] == "exact_text", third.told


def test_what_was_evicted_is_stored_when_it_comes_again(tmp_path):
    """A store with room for one prompt: the first is evicted by the second, and stored again at its own second coming."""
    first, second = tokens(300, 81), tokens(300, 82)

    def stored():
        return [list(meta.token_ids) for meta in worker_side().store.metas()]

    with running(extra={"store_dir": str(tmp_path / "kv"), "max_bytes": 2_000_000}) as engine:
        for prompt in (first, second, first):
            engine.reset_prefix_cache()
            (output,) = engine.ask([prompt])
            engine.settle()
            assert output.told["method"] == "none"
            assert stored() == [prompt]
        engine.reset_prefix_cache()
        (again,) = engine.ask([first])
        assert again.told["method"] == "exact"


def test_who_did_not_ask_is_told_of_what_is_approximate_alone():
    """Another response has no `kv_transfer_params` of ours: a router would take them for orders."""
    from vllm import SamplingParams

    settings = {"mode": "blend", "blend_max_share": 1.0}
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    moved = tokens(20, 83) + A[100:]
    with running(extra=settings, worker_extension_cls=EXTENSION) as engine:
        (exact,) = engine.llm.generate([{"prompt_token_ids": A}], greedy, use_tqdm=False)
        assert exact.kv_transfer_params is None
        engine.settle()
        engine.reset_prefix_cache()
        (blended,) = engine.llm.generate([{"prompt_token_ids": moved}], greedy, use_tqdm=False)
        assert blended.kv_transfer_params["dejakv"]["approximate"]


def test_engines_of_other_weights_share_a_folder(tmp_path):
    """Each finds its own state alone, whoever stored last, and the other's stays."""
    changed = tmp_path / "changed"
    shutil.copytree(DOCS, changed)
    weights = load_file(changed / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name] * 1.5
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    models, truth = (DOCS, changed), {}
    for model in models:
        with running(model, connector=False) as engine:
            (output,) = engine.ask([A])
            truth[model] = output.tokens
    for model, method in [*((model, "none") for model in models), *((model, "exact") for model in models)]:
        with running(model, {"store_dir": str(tmp_path / "store")}) as engine:
            (output,) = engine.ask([A])
            assert (output.told["method"], output.tokens) == (method, truth[model])
            engine.settle()
