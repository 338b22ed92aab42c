"""Blending through the engine, on the bundled model that knows documents."""

import random
from typing import get_args

import numpy as np
import pytest
from tests.tiny_models import blended

from dejakv.blend.sentences import sentence_ends
from dejakv.blend.settings import BlendConfig, BlendSelector
from dejakv.engines.base import Engine
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.request import Request, Sampling
from dejakv.store.base import StateInfo, StoredState
from dejakv_models.docs import Document, change, edit, make_document, merge, prompt_of, unrelated


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine.from_pretrained("docs-lm", "fp32", "cpu")


def prepared(engine, document, question, **sampling):
    text = prompt_of(document.text, question)
    return engine.prepare(Request("r", text, text, sampling=Sampling(**{"max_new_tokens": 3, **sampling})))


def state_of(engine, document, question="What pet does Ann have?"):
    ready = prepared(engine, document, question)
    state = engine.run(ready).capture()
    return StoredState(StateInfo("d", "default", engine.epoch, ready.token_ids, ready.request.prompt, ""), state)


@pytest.mark.shows("blend", model="docs-lm")
def test_an_edited_document_is_answered_as_it_is_now(engine):
    rng = random.Random(4)
    for _ in range(4):
        made = edit(make_document(rng, 10), rng, facts=2, questions=2)
        donor = state_of(engine, made.donor)
        for question in (question for question in made.questions if question.must_change):
            ready = prepared(engine, made.target, question.text)
            got = blended(engine, ready, [donor])
            full = engine.run(ready)
            report = got.details["blend"]
            assert got.text == full.text
            assert report.share < 0.6
            assert got.computed_tokens == pytest.approx(
                report.share * len(ready.token_ids) + report.question_tokens, abs=1
            )
            assert got.prompt_tokens == len(ready.token_ids)
            assert got.capture() is None  # an approximate state is no donor
            assert got.bytes_loaded == donor.tensor.nbytes
            assert 0 < got.inject_s <= got.ttft_s <= got.latency_s


def test_everything_recomputed_is_full_prefill(engine):
    rng = random.Random(5)
    made = change("reorder", make_document(rng, 8), rng)
    ready = prepared(engine, made.target, made.questions[0].text, max_new_tokens=6)
    full = engine.run(ready)
    for selector in get_args(BlendSelector):
        config = BlendConfig(share=1.0, selector=selector)
        assert blended(engine, ready, [state_of(engine, made.donor)], config).token_ids == full.token_ids


def test_two_donors_answer_about_both(engine):
    rng = random.Random(7)
    made = merge(make_document(rng, 8), rng, questions=4)
    other = Document(made.target.sentences[: len(made.target.sentences) - len(made.donor.sentences)])
    donors = [state_of(engine, made.donor), state_of(engine, other)]
    for question in made.questions:
        ready = prepared(engine, made.target, question.text)
        got = blended(engine, ready, donors, BlendConfig(selector="similarity", share=0.0))
        assert got.text == engine.run(ready).text
        assert got.details["blend"].share < 0.35


def test_what_has_too_little_in_common_is_computed_in_full(engine):
    rng = random.Random(8)
    made = unrelated(make_document(rng, 10), rng)
    ready = prepared(engine, made.target, made.questions[0].text)
    got = blended(engine, ready, [state_of(engine, made.donor)])
    assert "too little is alike" in got.details["blend"].reason
    assert got.details["blend"].share == 1.0
    assert got.computed_tokens == got.prompt_tokens
    assert got.token_ids == engine.run(ready).token_ids


def test_a_donor_of_another_model_is_not_used(engine):
    rng = random.Random(9)
    document = make_document(rng, 4)
    donor = state_of(engine, document)
    foreign = StoredState(StateInfo("d", "default", "other", donor.meta.token_ids, "", ""), donor.tensor)
    ready = prepared(engine, document, "Where does Ann live?")
    assert "another model" in blended(engine, ready, [foreign]).details["blend"].reason


def test_other_engines_refuse(engine):
    class Other(Engine):
        name = "other"

    document = make_document(random.Random(1), 4)
    ready = prepared(engine, document, "Where does Ann live?")
    assert "cannot blend" in Other().blend(ready, [state_of(engine, document)]).reason


@pytest.mark.parametrize(
    "wrong", [{"map": "best"}, {"selector": "value"}, {"share": 1.5}, {"tail": 0}, {"max_share": -1.0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError):
        BlendConfig(**wrong)


def test_sentence_ends_are_found_in_a_tokenizer(engine):
    ends = sentence_ends(engine.tokenizer)
    pieces = engine.tokenizer.convert_ids_to_tokens(ends.tolist())
    assert {".", "?", "!"} <= set(pieces)
    assert all(piece.endswith((".", "?", "!")) for piece in pieces)
    assert sentence_ends(object()) is None


def test_a_blend_may_be_declined_by_its_first_token(engine):
    """Nobody has seen a token of it then, and the prompt is run in full."""
    document = make_document(random.Random(1), 4)
    ready = prepared(engine, document, "Where does Ann live?")
    donor = state_of(engine, document)
    asked, given = [], []

    def accept(logs):
        asked.append(logs)
        return "not sure enough" if len(asked) == 1 else ""

    def on_token(token, text):
        given.append(token)

    declined = blended(engine, ready, [donor], accept=accept, on_token=on_token)
    full = engine.run(ready)
    assert (declined.token_ids, given) == (full.token_ids, list(full.token_ids))
    assert (declined.details["blend"].reason, declined.details["blend"].blended) == ("not sure enough", False)
    accepted = blended(engine, ready, [donor], accept=accept)
    assert accepted.details["blend"].blended
    assert len(asked) == 2
    for logs in asked:
        assert logs.shape == (engine.model.config.vocab_size,)
        assert np.exp(logs).sum() == pytest.approx(1, abs=1e-4)
        assert int(logs.argmax()) == accepted.token_ids[0]
