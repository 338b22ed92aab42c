"""The engine with a layer-condensed model: exact state, and the top layer's state of other prompts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.lckv.conftest import tiny
from tiny_transformers import WAYS, chunk_of, request, text_engine, text_model, tokenizer, vocabulary

from dejakv.engines.base import Blends, Start, TakesTopLayer, check_top_layer, no_top_layer
from dejakv.engines.blending import run_blend
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.pruning import pruning_of
from dejakv.errors import ModelError
from dejakv.records import UNSOUND_LABEL
from dejakv.request import Sampling
from dejakv.reuse.blend import BlendReport
from dejakv.reuse.top_layer import TopLayerConfig
from dejakv.store.base import ROWS

DONOR = "what colour is the cube beside the red cone how many balls are there left of it yes no one two three green"
LONGER = f"{DONOR} what is the red ball beside the green cone"
CONFIG = TopLayerConfig(tail=6, max_share=1.0)


@pytest.fixture(scope="module", params=["0_1_4_4_4", "0_3_3_3_4", "0_2_2_4_4"])
def engine(request):
    model = tiny(request.param, vocab_size=vocabulary(), max_position_embeddings=256)
    return TransformersEngine(model, tokenizer())


def prepared(engine, prompt, **sampling):
    return engine.prepare(request(prompt, **sampling))


def donor_of(engine, prompt=DONOR, **meta):
    asked = prepared(engine, prompt)
    chunk = chunk_of(engine, asked, engine.run(asked))
    return replace(chunk, meta=replace(chunk.meta, **meta))


def test_its_state_is_the_layers_that_compute_kv(engine):
    layout = engine.model.model.layout
    state = donor_of(engine).tensor
    assert engine.capabilities.reuse
    assert state.shape[:2] == (2, len(layout.kv_layers))
    assert engine.costs(timed=False).token_bytes == state.nbytes / state.shape[3]


@pytest.mark.parametrize("sampling", WAYS)
@pytest.mark.parametrize("held", [1, 9, None])
def test_a_run_from_exact_state_answers_as_the_uncached_one(engine, sampling, held):
    asked = prepared(engine, LONGER)
    chunk = donor_of(engine, LONGER if held is None else DONOR)
    full = engine.run(asked, sampling=sampling)
    got = engine.run(asked, start=Start(chunk, held or len(asked.token_ids)), sampling=sampling)
    assert got.token_ids == full.token_ids
    assert got.computed_tokens < full.computed_tokens
    again, whole = got.capture(), full.capture()
    assert np.allclose(again.data.view(np.float32), whole.data.view(np.float32), atol=1e-4)


def test_what_comes_next_is_told_from_the_state_that_a_run_left(engine):
    asked = prepared(engine, LONGER)
    full = engine.run(asked)
    resumed = engine.run(asked, start=Start(donor_of(engine), 20))
    assert np.allclose(full.continued(full.token_ids), resumed.continued(full.token_ids), atol=1e-3)


@pytest.mark.parametrize("sampling", WAYS)
def test_a_prompt_that_begins_as_its_donor_answers_as_in_full(engine, sampling):
    """The rows that it takes are its own then, and all others are computed: the answer is exact."""
    asked, pieces = prepared(engine, LONGER), []
    full = engine.run(asked, sampling=sampling)
    new = len(asked.token_ids) - len(prepared(engine, DONOR).token_ids)
    config = replace(CONFIG, tail=new)
    got = engine.top_layer(asked, [donor_of(engine)], config, sampling=sampling, on_token=lambda _, t: pieces.append(t))
    assert got.token_ids == full.token_ids
    assert got.text.startswith("".join(pieces))  # the last character may never have been completed
    assert np.allclose(got.continued((3, 4)), full.continued((3, 4)), atol=1e-3) or sampling.num_beams > 1
    assert got.label == ""
    report, layout = got.details["blend"], engine.model.model.layout
    assert report.rows == tuple(len(asked.token_ids) if i in layout.bottom else new for i in range(5))
    assert got.computed_tokens == -(-sum(report.rows) // 5)


def test_nothing_of_it_is_kept(engine):
    asked = prepared(engine, LONGER)
    got = engine.top_layer(asked, [donor_of(engine)], CONFIG)
    assert got.capture() is None
    assert got.rows is None


def test_moved_text_takes_rows_of_two_donors(engine):
    one, other = "how many balls are there left of it yes no", "what colour is the cube beside the red cone"
    asked = prepared(engine, f"{other} {one} what is green")
    got = engine.top_layer(asked, [donor_of(engine, one), donor_of(engine, other)], CONFIG)
    assert got.details["blend"].blended
    assert got.details["blend"].rows[-1] < len(asked.token_ids)


def test_its_first_token_may_be_declined(engine):
    done = engine.top_layer(prepared(engine, LONGER), [donor_of(engine)], CONFIG, accept=lambda logs: f"{len(logs)}")
    assert isinstance(done, BlendReport)
    assert done.reason == str(vocabulary())
    assert not done.blended


@pytest.mark.parametrize(
    ("meta", "reason"),
    [({"epoch": "another"}, "of another model"), ({"kind": ROWS}, "a part of a prompt's")],
)
def test_state_that_is_not_a_prompts_own_of_this_model_is_not_taken(engine, meta, reason):
    done = engine.top_layer(prepared(engine, LONGER), [donor_of(engine, **meta)], CONFIG)
    assert isinstance(done, BlendReport)
    assert reason in done.reason


@pytest.mark.parametrize(("layout", "shape"), [("0_1_4_4_4", {"num_key_value_heads": 4}), ("0_4_4_4_4", {})])
def test_state_of_another_shape_is_not_taken(layout, shape):
    """What came under the right epoch is looked at all the same before it is used."""
    engine = TransformersEngine(tiny("0_1_4_4_4", vocab_size=vocabulary()), tokenizer())
    other = TransformersEngine(tiny(layout, vocab_size=vocabulary(), **shape), tokenizer())
    done = engine.top_layer(prepared(engine, LONGER), [donor_of(other, epoch=engine.epoch)], CONFIG)
    assert "of another model" in done.reason


def test_exact_state_of_other_layers_is_refused():
    engine, other = (
        TransformersEngine(tiny(layout, vocab_size=vocabulary()), tokenizer()) for layout in ("0_1_4_4_4", "0_4_4_4_4")
    )
    foreign = donor_of(other, epoch=engine.epoch)
    with pytest.raises(ModelError, match="of another model; clear the cache directory"):
        engine.run(prepared(engine, LONGER), start=Start(foreign, 9))


def test_too_little_in_common_runs_in_full_and_says_so(engine):
    asked = prepared(engine, "green three two one no yes")
    done = run_blend(engine, asked, [donor_of(engine)], TopLayerConfig())
    assert done.token_ids == engine.run(asked).token_ids
    assert "too little is alike" in done.details["blend"].reason


def test_it_is_not_pruned_and_not_blended(engine):
    with pytest.raises(ModelError, match="leave out --prune"):
        pruning_of("attention", engine.model)
    done = run_blend(engine, prepared(engine, LONGER), [donor_of(engine)])
    assert "blend cannot work with LCKV" in done.details["blend"].reason


def test_engines_say_what_they_can(engine):
    assert isinstance(engine, Blends)
    assert isinstance(engine, TakesTopLayer)
    assert no_top_layer(engine) == ""
    assert "use the transformers engine" in no_top_layer(object())
    done = run_blend(
        _Other(), prepared(engine, LONGER), [], CONFIG, instead=lambda: engine.run(prepared(engine, LONGER))
    )
    assert "other has no top_layer" in done.details["blend"].reason


class _Other:
    name = "other"


def test_an_ordinary_model_is_refused_unless_it_is_studied():
    from dejakv.config import SemanticCacheConfig

    llama = text_engine("llama")
    assert "every layer attends to its own KV" in no_top_layer(llama)
    assert no_top_layer(llama, unsound=True) == ""
    with pytest.raises(ModelError, match=r"every layer attends to its own KV.*docs-lckv.*--unsound"):
        check_top_layer(llama, SemanticCacheConfig(reuse="top_layer"))
    check_top_layer(llama, SemanticCacheConfig(reuse="top_layer", unsound=True))
    check_top_layer(llama, SemanticCacheConfig(reuse="blend"))


@pytest.mark.parametrize(
    ("name", "attn", "reason"),
    [("mistral_window", "sdpa", "windows"), ("gemma2", "sdpa", "windows"), ("llama", "eager", "--attn sdpa")],
)
def test_models_whose_layers_cannot_differ_in_length_cannot_be_studied(name, attn, reason):
    assert reason in no_top_layer(text_engine(name, attn=attn), unsound=True)


UNSOUND = replace(CONFIG, unsound=True)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_what_an_ordinary_model_says_is_labelled(name):
    engine, pieces = text_engine(name), []
    asked = prepared(engine, LONGER)
    got = engine.top_layer(asked, [donor_of(engine)], UNSOUND, on_token=lambda _, text: pieces.append(text))
    assert got.label == UNSOUND_LABEL
    assert pieces[0].startswith(UNSOUND_LABEL)
    assert (UNSOUND_LABEL + got.text).startswith("".join(pieces))
    n, held = len(asked.token_ids), len(prepared(engine, DONOR).token_ids)
    assert got.computed_tokens == max(6, n - held)
    assert set(got.details["blend"].rows) == {got.computed_tokens}
    assert got.capture() is None
    assert got.continued(got.token_ids) is None


@pytest.mark.parametrize("sampling", [WAYS[0], WAYS[2]])
def test_an_ordinary_model_that_takes_nothing_answers_as_ever(sampling):
    """With all rows computed it runs token by token through layers of equal length."""
    engine = text_engine("llama")
    asked = prepared(engine, LONGER)
    everything = replace(UNSOUND, tail=len(asked.token_ids))
    got = engine.top_layer(asked, [donor_of(engine)], everything, sampling=sampling)
    assert got.token_ids == engine.run(asked, sampling=sampling).token_ids


def test_beams_are_not_studied():
    engine = text_engine("llama")
    done = engine.top_layer(prepared(engine, LONGER), [donor_of(engine)], UNSOUND, sampling=Sampling(4, num_beams=2))
    assert "beams" in done.reason


def test_an_ordinary_model_is_refused_by_request_too():
    engine = text_engine("llama")
    done = engine.top_layer(prepared(engine, LONGER), [donor_of(engine)], CONFIG)
    assert "every layer attends to its own KV" in done.reason


def test_a_model_in_half_precision_settles():
    engine = TransformersEngine(tiny("0_1_4_4_4", vocab_size=vocabulary()).to(torch.bfloat16), tokenizer())
    assert engine.capabilities.reuse
    assert engine.top_layer(prepared(engine, LONGER), [donor_of(engine)], CONFIG).details["blend"].blended


def test_an_ordinary_model_is_not_changed_by_the_study():
    model = text_model("llama")
    engine = TransformersEngine(model, tokenizer())
    epoch = engine.epoch
    engine.top_layer(prepared(engine, LONGER), [donor_of(engine)], UNSOUND)
    assert engine.run(prepared(engine, LONGER)).capture() is not None
    assert engine.epoch == epoch
