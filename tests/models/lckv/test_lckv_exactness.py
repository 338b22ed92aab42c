"""Iterated prefill equals token-by-token decoding, and reuse leaves out what it says."""

import pytest
import torch
from tests.models.lckv.conftest import sequential_prefill, tiny

from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.lckv.cache import GivenRows, LCKVCache

TOLERANCE = 2e-5
"""Logits reach 2. Sums in another order differ by a few millionths, more on some processors; a missing iteration by a tenth."""


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def test_as_many_iterations_as_tokens_are_exact(model, ids):
    model.config.forward_passes = ids.shape[1] - model.config.backward_passes
    assert torch.allclose(logits(model, ids), sequential_prefill(model, ids)[0], atol=TOLERANCE)


def test_the_papers_iterations_come_near(ids):
    model = tiny("0_1_4_4_4")
    exact = sequential_prefill(model, ids)[0]
    near = (logits(model, ids) - exact).abs().max()
    model.config.forward_passes, model.config.backward_passes = 0, 1
    far = (logits(model, ids) - exact).abs().max()
    assert near < 0.01 * exact.std() < far


def test_left_padding_changes_nothing(model, ids):
    model.config.forward_passes = 30
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 5).long().expand(2, -1)
    got = logits(model, padded, attention_mask=mask)
    assert torch.allclose(got[:, 5:], logits(model, ids), atol=TOLERANCE)


def test_the_first_token_sees_nothing_in_condensed_layers(ids):
    """So its condensed layers add only their feed-forward part, and the value projection cannot matter."""
    model = tiny("4_4_4_4_4")
    before = logits(model, ids[:, :1])
    with torch.no_grad():
        model.model.layers[4].self_attn.o_proj.weight.zero_()  # the target itself sees its own token
    reference = logits(model, ids[:, :1])
    with torch.no_grad():
        for layer in model.model.layers[:4]:
            layer.self_attn.o_proj.weight.mul_(100)
    assert torch.equal(logits(model, ids[:, :1]), reference)
    assert not torch.equal(before, reference)


def test_what_stands_in_computed_rows_is_not_used(ids):
    model = tiny("0_1_4_4_4", forward_passes=30)
    exact, donor = sequential_prefill(model, ids)
    keys, values = donor.layers[2].keys.clone(), donor.layers[2].values.clone()
    keys[:, :, 5], values[:, :, 5] = 1e3, float("nan")
    index = torch.tensor([5, ids.shape[1] - 1]).expand(2, -1)
    cache = LCKVCache(model.model.layout, GivenRows({4: (keys, values)}, index))
    got = logits(model, ids, **{CACHE_NAME: cache}, use_cache=True)
    assert torch.allclose(got[:, -1], exact[:, -1], atol=TOLERANCE)


def test_gradients_flow_through_the_last_iterations_alone(ids):
    model = tiny("0_1_4_4_4", forward_passes=2, backward_passes=2)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_attentions_and_hidden_states_are_refused(ids):
    with pytest.raises(ValueError, match="many times"):
        tiny("0_1_4_4_4")(ids, output_hidden_states=True)


@pytest.mark.parametrize("mask", [torch.ones(2, 7), torch.ones(2, 1, 24, 24)])
def test_masks_that_do_not_fit_name_the_shape(ids, mask):
    with pytest.raises(ValueError, match="does not fit"):
        tiny("0_1_4_4_4")(ids, attention_mask=mask)
