"""Blend through a real engine: its two exact ends, and what it must refuse."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_harness import BLENDING, DOCS, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm import llama
from dejakv.engines.vllm.buffers import Buffers
from dejakv.store.base import Chunk, Tensor

A = tokens(401, 11)
B = changed(A, 0.2, 12)


@pytest.fixture(scope="module")
def engine():
    with running(extra=BLENDING, worker_extension_cls=EXTENSION) as running_engine:
        running_engine.ask([A], salt="donor-less")
        running_engine.ask([A])
        running_engine.settle()
        yield running_engine


def _blended(engine, prompt, **options):
    (output,) = engine.ask([prompt], wish={"mode": "blend", **options})
    return output


def test_blend_exactness(engine):
    """All rows recomputed equals exact; an identical donor with one row recomputed equals exact."""
    (truth,) = engine.ask([B], salt="truth", wish={"mode": "off", "no_store": True})
    blender = worker_side().blender
    chunk = _stored()
    assert blender.check(chunk) == ""

    draft = _draft(blender, B, chunk)
    every = blender.mix(_with(draft, forced=torch.ones(len(B), dtype=torch.bool)))
    assert every.computed == len(B)
    exact = _exact_state(engine, B)
    assert (every.state - exact).abs().max() < 1e-4 * exact.abs().max()

    same = _draft(blender, A, chunk)
    forced = torch.zeros(len(A), dtype=torch.bool)
    forced[-1] = True
    from dejakv.reuse.schedule import Schedule

    one = blender.mix(_with(replace(same, tail=1), forced=forced, schedule=Schedule((0.0,) * 4)))
    assert one.computed == 1
    stored = torch.from_numpy(chunk.tensor.data.copy())
    assert torch.equal(one.state[:, :, :, :-1], stored[:, :, :, :-1])
    assert (one.state - stored).abs().max() < 1e-4 * stored.abs().max()

    engine.reset_prefix_cache()
    full = _share(blender, 1.0)
    with full:
        output = _blended(engine, B)
    assert output.told["method"] == "blend"
    assert output.told["approximate"]
    assert output.tokens == truth.tokens


def test_the_questions_attention_is_the_models_own_and_chooses_rows(engine):
    """From a state that is exact: the weights are those that transformers works out, and the rows are the forced ones and the
    best of them."""
    from transformers import AutoModelForCausalLM

    from dejakv.reuse.schedule import Schedule
    from dejakv.reuse.selector import Selector, choose

    blender = worker_side().blender
    stored = _stored()
    approximate = replace(
        stored, meta=replace(stored.meta, generation=1)
    )  # else all of it is an exact prefix, and nothing is chosen
    draft = _draft(blender, A, approximate)
    draft = _with(draft, selector=Selector("query"), schedule=Schedule((0.2,) * 4), runs=None)
    got = blender.question_attention(draft)
    model = AutoModelForCausalLM.from_pretrained(DOCS, attn_implementation="eager")
    with torch.inference_mode():
        layers = model(torch.tensor([A]), output_attentions=True).attentions
    wanted = sum(layer[0, :, -draft.tail :].sum((0, 1)) for layer in layers)
    assert torch.allclose(got, wanted, rtol=1e-2, atol=1e-3 * float(wanted.max()))
    late = blender.question_attention(_with(draft, selector=Selector("prophet")))
    wanted = sum(layer[0, :, -draft.tail :].sum((0, 1)) for layer in layers[2:])
    assert torch.allclose(late, wanted, rtol=1e-2, atol=1e-3 * float(wanted.max()))

    draft.state[:, :, :, : -draft.tail] = 0.0  # whatever is not computed stays nothing
    scores = blender.question_attention(draft)
    kept = choose(scores, draft.plan.forced, round(0.2 * len(A)))
    mixed = blender.mix(draft)
    assert mixed.computed == len(kept)
    assert mixed.state.abs().sum((0, 1, 2, 4)).nonzero().squeeze(1).tolist() == kept.tolist()


def _stored():
    """The state that was stored without a salt."""
    (meta,) = worker_side().store.metas(partition="default")
    return worker_side().store.get(meta.id)


def _draft(blender, prompt, *chunks):
    """The draft of a prompt of which vLLM holds nothing and computes nothing."""
    chunk_of = {chunk.meta.id: chunk for chunk in chunks}
    metas = [chunk.meta for chunk in chunks]
    return blender.draft(prompt, 0, len(prompt), metas, chunk_of.__getitem__, Buffers(1 << 24))


def _with(draft, **values):
    """The draft with other values in its plan."""
    return replace(draft, plan=replace(draft.plan, **values))


def _share(blender, share):
    """The blender with another share of recomputed rows, for a `with`."""
    import contextlib

    @contextlib.contextmanager
    def patched():
        before = blender.config
        blender.config = replace(before, share=share, complete=0)
        try:
            yield
        finally:
            blender.config = before

    return patched()


def _exact_state(engine, prompt):
    """What vLLM itself computes for a prompt, taken from the store."""
    engine.ask([prompt], salt="exact-state")
    engine.settle()
    from dejakv.engines.vllm.keys import partition_of

    (meta,) = worker_side().store.metas(partition=partition_of("exact-state"))
    return torch.from_numpy(worker_side().store.get(meta.id).tensor.data.copy())


def test_other_models_are_refused():
    """A decoder that is not built like Llama is named with what is wrong about it."""
    assert "has no model.layers" in llama.why_not(SimpleNamespace())
    layer = SimpleNamespace(
        input_layernorm=1,
        post_attention_layernorm=1,
        mlp=1,
        self_attn=SimpleNamespace(qkv_proj=1, o_proj=1, rotary_emb=1, q_size=1, kv_size=1, scaling=1, q_norm=1),
    )
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer], embed_input_ids=1))
    assert "have q_norm" in llama.why_not(model)
    del layer.self_attn.q_norm
    layer.self_attn.do_llama_4_scaling = True
    assert "llama_4_scaling" in llama.why_not(model)
    layer.self_attn.do_llama_4_scaling = False
    assert "rotates keys in a way that is not known" in llama.why_not(model)  # longrope has two tables
    layer.self_attn.rotary_emb = SimpleNamespace(cos_sin_cache=1)
    assert llama.why_not(model) == ""


def test_a_model_that_differs_far_into_a_prompt_is_found_out(engine, monkeypatch):
    """Queries that grow with their position, as Llama 4's and Ministral's do: the first hundred tokens are right."""
    blender, chunk = worker_side().blender, _stored()
    rotate = blender.decoder.rotate

    def scaled(index, rows, q, k):
        q, k = rotate(index, rows, q, k)
        return q * torch.where(rows >= 100, 1.5, 1.0)[:, None], k

    monkeypatch.setattr(blender.decoder, "rotate", scaled)
    monkeypatch.setattr(blender, "_checked", 0)
    monkeypatch.setattr(blender, "_problem", "")
    short = Chunk(
        replace(chunk.meta, token_ids=chunk.meta.token_ids[:90]),
        Tensor(np.ascontiguousarray(chunk.tensor.data[:, :, :, :90]), "F32"),
    )
    assert blender.check(short) == ""
    assert "the end of a stored state of 401 tokens gave another one" in blender.check(chunk)
    assert blender.check(short) != "", "what is wrong once stays off"


def test_impossible_blend_runs_exactly_and_is_stored(engine):
    """A donor with too little in common: the exact prefix is taken instead, the prompt is computed, and it is stored."""
    blender = worker_side().blender
    before = blender.config
    blender.config = replace(before, max_share=0.0)
    try:
        mixed = A[:128] + tokens(300, 13)
        engine.reset_prefix_cache()
        output = _blended(engine, mixed)
        engine.settle()
    finally:
        blender.config = before
    assert not output.told["approximate"]
    assert output.told["method"] == "exact"
    assert output.told["level"] == "prefix"
    assert output.told["tokens_reused"] == 128
    assert "min_gain: blend would save 0 tokens" in output.told["reason"]
    assert [meta for meta in worker_side().store.metas() if list(meta.token_ids) == mixed]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("width", [8, 6])
def test_moved_keys_are_those_of_their_new_places(halves, width):
    """Keys rotated for one place and moved equal keys rotated for the other; the rest of a partly rotated head stays."""
    half = width // 2
    angles = torch.arange(64)[:, None] / 10 ** torch.arange(half)[None]
    rotary = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], 1), is_neox_style=halves)
    decoder = object.__new__(llama.Decoder)
    decoder.layers = [SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rotary))] * 2
    source, target = torch.tensor([3, 9, 10, 40]), torch.tensor([3, 0, 50, 41])
    plain = torch.randn(2, 3, 4, 8, dtype=torch.float64)

    def rotated(places):
        cos, sin = angles[places].cos(), angles[places].sin()
        turned = plain[..., :width]
        one, other = turned.chunk(2, -1) if halves else (turned[..., 0::2], turned[..., 1::2])
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned, plain[..., width:]], -1).float()

    keys = rotated(source)
    before = keys.clone()
    decoder.move(keys, source, target)
    torch.testing.assert_close(keys, rotated(target), rtol=1e-4, atol=1e-5)
    assert torch.equal(keys[:, :, 0], before[:, :, 0])  # what stays in place stays bit for bit
