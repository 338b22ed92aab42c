"""The engine with models whose upper layers share KV: prompts skip these layers, and nothing changes."""

import numpy as np
import pytest
import torch
import transformers as hf
from tests.sim_llm.test_sim_llm_shared_kv import SHAPE
from tiny_transformers import WAYS, chunk_of, request, tokenizer, vocabulary

import dejakv.engines.transformers.engine as module
from dejakv import attach
from dejakv.engines.base import Start
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.shared_kv import SharedKVPrefill

PROMPT = "what colour is the cube beside the red cone how many balls are there left of it"
OWN = {
    "vocab_size": vocabulary(),
    "vocab_size_per_layer_input": vocabulary(),
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "eos_token_id": 1,
}


def gemma3n():
    return hf.Gemma3nTextConfig(
        **{**SHAPE, **OWN}, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 6
    )


def gemma4():
    return hf.Gemma4TextConfig(**{**SHAPE, **OWN}, global_head_dim=8)


@pytest.fixture(scope="module", params=[gemma3n, gemma4])
def engine(request):
    torch.manual_seed(0)
    return TransformersEngine(hf.AutoModelForCausalLM.from_config(request.param()).eval(), tokenizer())


@pytest.fixture
def opened(monkeypatch):
    """Every `SharedKVPrefill` that the engine opens."""
    made = []

    class Noted(SharedKVPrefill):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

    monkeypatch.setattr(module, "SharedKVPrefill", Noted)
    return made


def without(engine, monkeypatch, asked, **given):
    with monkeypatch.context() as patch:
        patch.setattr(module, "shares_kv", lambda _: 0)
        return engine.run(asked, **given)


@pytest.mark.parametrize("sampling", [WAYS[0], WAYS[2]])
def test_prompts_skip_the_sharing_layers_and_answers_stay(engine, opened, monkeypatch, sampling):
    asked = engine.prepare(request(PROMPT))
    plain = without(engine, monkeypatch, asked, sampling=sampling)
    assert not opened
    got = engine.run(asked, sampling=sampling)
    assert [one.skipped for one in opened] == [3 * (len(asked.token_ids) - 1)]
    assert got.token_ids == plain.token_ids
    assert np.allclose(got.capture().data.view(np.float32), plain.capture().data.view(np.float32), atol=1e-5)


def test_the_first_tokens_logits_are_equal(engine, opened, monkeypatch):
    asked = engine.prepare(request(PROMPT))
    arguments = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    got = engine.generate(asked, arguments).details["output"].logits[0]
    with monkeypatch.context() as patch:
        patch.setattr(module, "shares_kv", lambda _: 0)
        plain = engine.generate(asked, arguments).details["output"].logits[0]
    assert opened[0].skipped
    assert torch.allclose(got, plain, atol=1e-5)


def test_beams_answer_as_ever(engine, monkeypatch):
    asked = engine.prepare(request(PROMPT))
    assert (
        engine.run(asked, sampling=WAYS[1]).token_ids == without(engine, monkeypatch, asked, sampling=WAYS[1]).token_ids
    )


@pytest.mark.parametrize("held", [1, 12, None])
def test_a_run_from_exact_state_skips_what_is_left(engine, opened, monkeypatch, held):
    asked = engine.prepare(request(PROMPT))
    full = without(engine, monkeypatch, asked)
    n = len(asked.token_ids)
    got = engine.run(asked, start=Start(chunk_of(engine, asked, full), held or n - 1))
    assert got.token_ids == full.token_ids
    assert opened[-1].skipped == 3 * (n - (held or n - 1) - 1)


def test_the_model_stays_as_it_was_between_runs(engine):
    asked, epoch = engine.prepare(request(PROMPT)), engine.epoch
    assert engine.run(asked).capture() is not None
    assert engine.epoch == epoch
    assert not engine.model._forward_pre_hooks


def test_foreign_code_sees_every_row(engine, opened):
    seen = []
    layer = list(engine.model.get_decoder().layers)[-1]
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[-2]), with_kwargs=True
    )
    try:
        asked = engine.prepare(request(PROMPT))
        engine.run(asked)
    finally:
        handle.remove()
        engine.weights_changed()
    assert not opened
    assert seen[0] == len(asked.token_ids)


def test_an_attached_model_skips_them_too(engine, opened):
    model, tok = engine.model, engine.tokenizer
    ids = torch.tensor([engine.prepare(request(PROMPT)).token_ids])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    with attach(model, tok):
        got = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(got, plain)
    assert opened
    assert opened[0].skipped
