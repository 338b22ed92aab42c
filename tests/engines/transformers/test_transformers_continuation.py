"""Teacher forcing from the state that a run left equals one forward pass over prompt and answer."""

import numpy as np
import pytest
import torch
from tests.tiny_models import IMAGES, PLACEHOLDER, TEXT, begun, image_engine, picture, request, state_of, text_engine

from dejakv.request import Sampling

PROMPT = "what colour is the cube beside the red cone, and how many green balls are left of it?"
ANSWER = (7, 11, 13, 5, 9)


@pytest.mark.parametrize("name", TEXT)
def test_it_is_the_forward_pass_of_prompt_and_answer(name: str) -> None:
    engine = text_engine(name)
    prepared = engine.prepare(request(PROMPT))
    ids = [*prepared.token_ids, *ANSWER]
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy()
    wanted = logits[len(prepared.token_ids) - 1 : -1]
    whole = engine.run(prepared)
    stored_state = state_of(engine, prepared, whole)
    half = begun(engine, prepared, stored_state, len(ids) // 2)
    beams = engine.full(prepared.sampled(Sampling(3, num_beams=2)))
    for run in (whole, half, beams):
        for _ in range(2):  # it changes nothing in the state it reads
            got = run.continued(ANSWER)
            assert got is not None
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=2e-4)
    before = whole.capture()
    assert before is not None
    np.testing.assert_array_equal(before.data, stored_state.tensor.data)


def test_a_long_answer_comes_in_pieces() -> None:
    engine = text_engine("llama")
    prepared = engine.prepare(request(PROMPT))
    answer = [*range(3, 90), *range(3, 53)]
    ids = torch.tensor([[*prepared.token_ids, *answer]])
    with torch.inference_mode():
        wanted = engine.model(input_ids=ids).logits[0, -len(answer) - 1 : -1].float().log_softmax(-1).numpy()
    pieces = list(engine.run(prepared).continued_in_pieces(answer))
    assert [len(piece) for piece in pieces] == [64, 64, 9]
    np.testing.assert_allclose(np.concatenate(pieces), wanted, atol=2e-4)


@pytest.mark.parametrize("name", IMAGES)
def test_with_pictures_it_repeats_what_the_answer_was_made_from(name: str) -> None:
    engine = image_engine(name)
    prepared = engine.prepare(request(f"{PLACEHOLDER[name]} {PROMPT}", (picture(3),)))
    run = engine.full(prepared.sampled(Sampling(4)))
    tokens = run.token_ids
    got = run.continued(tokens)
    assert got is not None
    assert tuple(got.argmax(-1)) == tokens


def test_without_tokens_or_plain_rows_there_is_none() -> None:
    engine = text_engine("llama")
    assert engine.run(engine.prepare(request(PROMPT))).continued(()) is None
