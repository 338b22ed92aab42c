"""The engine with a layer-condensed model: exact state, and the top layer's state of other prompts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.lckv.conftest import tiny
from tests.tiny_models import WAYS, begun, blended, request, state_of, text_engine, tokenizer, vocabulary

from dejakv.cache import check_method
from dejakv.decide.method import method_named
from dejakv.engines.base import Refusal
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.decoding import pruning_of
from dejakv.errors import ModelError
from dejakv.prototypes.top_layer.rows import TopLayerConfig
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
    stored_state = state_of(engine, asked, engine.run(asked))
    return replace(stored_state, meta=replace(stored_state.meta, **meta))


def test_its_state_is_the_layers_that_compute_kv(engine):
    layout = engine.model.model.layout
    state = donor_of(engine).tensor
    assert engine.capabilities.reuse
    assert state.shape[:2] == (2, len(layout.kv_layers))
    assert engine.costs(timed=False).token_bytes == state.nbytes / state.shape[3]


@pytest.mark.parametrize(
    ("sampling", "held"),
    [(WAYS[0], 1), (WAYS[0], None), *((way, 9) for way in WAYS)],
    ids=lambda value: str(value)[:40],
)
def test_a_run_from_exact_state_answers_as_the_uncached_one(engine, sampling, held):
    asked = prepared(engine, LONGER)
    stored_state = donor_of(engine, LONGER if held is None else DONOR)
    full = engine.full(asked.sampled(sampling))
    got = begun(engine, asked.sampled(sampling), stored_state, held or len(asked.token_ids))
    assert got.token_ids == full.token_ids
    assert got.computed_tokens < full.computed_tokens
    again, whole = got.capture(), full.capture()
    assert np.allclose(again.data.view(np.float32), whole.data.view(np.float32), atol=1e-4)


def test_what_comes_next_is_told_from_the_state_that_a_run_left(engine):
    asked = prepared(engine, LONGER)
    full = engine.run(asked)
    resumed = begun(engine, asked, donor_of(engine), 20)
    assert np.allclose(full.continued(full.token_ids), resumed.continued(full.token_ids), atol=1e-3)


@pytest.mark.parametrize("sampling", WAYS)
def test_a_prompt_that_begins_as_its_donor_answers_as_in_full(engine, sampling):
    """The rows that it takes are its own then, and all others are computed: the answer is exact."""
    asked, pieces = prepared(engine, LONGER), []
    full = engine.full(asked.sampled(sampling))
    new = len(asked.token_ids) - len(prepared(engine, DONOR).token_ids)
    config = replace(CONFIG, tail=new)
    got = engine.blend(asked.sampled(sampling), [donor_of(engine)], config, on_token=lambda _, t: pieces.append(t))
    assert got.token_ids == full.token_ids
    assert got.text.startswith("".join(pieces))  # the last character may never have been completed
    assert np.allclose(got.continued((3, 4)), full.continued((3, 4)), atol=1e-3) or sampling.num_beams > 1
    report, layout = got.details["blend"], engine.model.model.layout
    assert report.rows == tuple(len(asked.token_ids) if i in layout.bottom else new for i in range(5))
    assert got.computed_tokens == -(-sum(report.rows) // 5)


def test_nothing_of_it_is_kept(engine):
    asked = prepared(engine, LONGER)
    got = engine.blend(asked, [donor_of(engine)], CONFIG)
    assert got.capture() is None
    assert got.rows is None


def test_moved_text_takes_rows_of_two_donors(engine):
    one, other = "how many balls are there left of it yes no", "what colour is the cube beside the red cone"
    asked = prepared(engine, f"{other} {one} what is green")
    got = engine.blend(asked, [donor_of(engine, one), donor_of(engine, other)], CONFIG)
    assert got.details["blend"].blended
    assert got.details["blend"].rows[-1] < len(asked.token_ids)


def test_its_first_token_may_be_declined(engine):
    done = engine.blend(prepared(engine, LONGER), [donor_of(engine)], CONFIG, accept=lambda logs: f"{len(logs)}")
    assert isinstance(done, Refusal)
    assert done.reason == str(vocabulary())
    assert not done.details["blend"].blended


@pytest.mark.parametrize(
    ("meta", "reason"),
    [({"epoch": "another"}, "of another model"), ({"kind": ROWS}, "a part of a prompt's")],
)
def test_state_that_is_not_a_prompts_own_of_this_model_is_not_taken(engine, meta, reason):
    done = engine.blend(prepared(engine, LONGER), [donor_of(engine, **meta)], CONFIG)
    assert isinstance(done, Refusal)
    assert reason in done.reason


@pytest.mark.parametrize(("layout", "shape"), [("0_1_4_4_4", {"num_key_value_heads": 4}), ("0_4_4_4_4", {})])
def test_state_of_another_shape_is_not_taken(layout, shape):
    """What came under the right epoch is looked at all the same before it is used."""
    engine = TransformersEngine(tiny("0_1_4_4_4", vocab_size=vocabulary()), tokenizer())
    other = TransformersEngine(tiny(layout, vocab_size=vocabulary(), **shape), tokenizer())
    done = engine.blend(prepared(engine, LONGER), [donor_of(other, epoch=engine.epoch)], CONFIG)
    assert "of another model" in done.reason


def test_exact_state_of_other_layers_is_refused():
    engine, other = (
        TransformersEngine(tiny(layout, vocab_size=vocabulary()), tokenizer()) for layout in ("0_1_4_4_4", "0_4_4_4_4")
    )
    foreign = donor_of(other, epoch=engine.epoch)
    assert "of another model; clear the cache directory" in begun(engine, prepared(engine, LONGER), foreign, 9).reason


def test_too_little_in_common_runs_in_full_and_says_so(engine):
    asked = prepared(engine, "green three two one no yes")
    done = blended(engine, asked, [donor_of(engine)], TopLayerConfig())
    assert done.token_ids == engine.run(asked).token_ids
    assert "too little is alike" in done.details["blend"].reason


def test_it_is_not_pruned_and_not_blended(engine):
    with pytest.raises(ModelError, match="leave out --prune"):
        pruning_of("attention", engine.model)
    done = blended(engine, prepared(engine, LONGER), [donor_of(engine)])
    assert "blend cannot work with LCKV" in done.details["blend"].reason


def test_an_ordinary_model_is_refused():
    from dejakv.config import SemanticCacheConfig

    llama = text_engine("llama")
    assert "every layer attends to its own KV" in method_named("top_layer").unsupported(llama)
    with pytest.warns(DeprecationWarning, match="no_top_layer is now"):
        assert "every layer attends to its own KV" in llama.no_top_layer()
    with pytest.raises(ModelError, match=r"every layer attends to its own KV.*docs-lckv.*reuse=blend"):
        check_method(llama, SemanticCacheConfig(reuse="top_layer"))
    check_method(llama, SemanticCacheConfig(reuse="blend"))
    done = llama.blend(prepared(llama, LONGER), [donor_of(llama)], CONFIG)
    assert "every layer attends to its own KV" in done.reason


def test_a_model_in_half_precision_settles():
    engine = TransformersEngine(tiny("0_1_4_4_4", vocab_size=vocabulary()).to(torch.bfloat16), tokenizer())
    assert engine.capabilities.reuse
    assert engine.blend(prepared(engine, LONGER), [donor_of(engine)], CONFIG).details["blend"].blended
