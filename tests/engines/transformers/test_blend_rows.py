"""Rows of a blend, taken from one position and used at another: keys are where a hand-computed rotation puts them."""

import numpy as np
import pytest
import torch
from tests import tiny_models as models

from dejakv.blend.forced import ForcedTokens
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens, TokenMap
from dejakv.engines.tensors import tensor_view
from dejakv.engines.transformers.blend_model import blend_model_of
from dejakv.engines.transformers.blending import plan_cache, rearrange
from dejakv.engines.transformers.kv import plain_cache, stacked_state
from dejakv.models.cache_name import CACHE_NAME
from dejakv.store.base import RawTensor

N, FIRST, STOP = 60, 20, 52


def state_of(model, ids):
    cache = plain_cache()
    with torch.inference_mode():
        model(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True)
    return stacked_state(cache, ids.shape[1])


def ids_of(n=N):
    return torch.from_numpy(np.random.default_rng(5).integers(3, 90, (1, n)))


def whole_map(source):
    return TokenMap(np.asarray(source), np.ones(len(source), np.float32), np.zeros(len(source), np.int64))


@pytest.mark.parametrize("name", ["llama", "llama+yarn", "qwen2"])
def test_a_run_is_moved_from_its_own_position(name):
    """The run alone gives what the whole prompt gives: row index and position are kept apart."""
    model = models.architecture_model(name)
    ids = ids_of()
    state = state_of(model, ids)
    run = RawTensor(np.ascontiguousarray(state.data[:, :, :, FIRST:STOP]), state.dtype)
    target = list(range(FIRST, STOP))
    whole = rearrange(
        blend_model_of(model), [[(0, state)]], DonorTokens.of(ids[0].tolist()), whole_map(target), "cpu", torch.float32
    )
    part = DonorTokens.of(ids[0, FIRST:STOP].tolist(), first=[FIRST])
    alone = rearrange(blend_model_of(model), [[(0, run)]], part, whole_map(range(STOP - FIRST)), "cpu", torch.float32)
    assert torch.equal(whole, alone)
    wrong = DonorTokens.of(ids[0, FIRST:STOP].tolist())  # as if it had been computed from position 0
    assert not torch.equal(
        whole,
        rearrange(blend_model_of(model), [[(0, run)]], wrong, whole_map(range(STOP - FIRST)), "cpu", torch.float32),
    )


def test_moved_keys_equal_a_rotation_by_hand():
    """Half-split rotary embedding: each pair of numbers turns by the difference of positions times its frequency."""
    model = models.architecture_model("llama")
    ids = ids_of()
    state = state_of(model, ids)
    run = RawTensor(np.ascontiguousarray(state.data[:, :, :, FIRST:STOP]), state.dtype)
    donors = DonorTokens.of(ids[0, FIRST:STOP].tolist(), first=[FIRST])
    moved = rearrange(blend_model_of(model), [[(0, run)]], donors, whole_map(range(STOP - FIRST)), "cpu", torch.float32)
    keys = tensor_view(run)[0].double()
    half = keys.shape[-1] // 2
    base = model.config.rope_parameters["rope_theta"]
    frequency = 1.0 / base ** (torch.arange(half, dtype=torch.float64) / half)
    angle = -FIRST * frequency
    one, other = keys[..., :half], keys[..., half:]
    by_hand = torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
    assert (moved[0].double() - by_hand).abs().max() <= 2e-5
    assert torch.equal(moved[1], tensor_view(run)[1])


def test_asking_the_question_leaves_the_donors_rows_for_the_offsets_to_compare_with():
    """A question that stands in the donor too tells how far the rows before it are off: by the donor's state, and not by what
    the pass that only ranks rows made of it."""
    model = models.architecture_model("llama")
    ids = ids_of()
    donor = ids.roll(7, 1)
    state = state_of(model, donor)
    donors, found = DonorTokens.of(donor[0].tolist()), whole_map(np.roll(np.arange(N), -7))
    tail = np.arange(N) >= N - 8
    needed, parts = ForcedTokens(tail, tail, 8, np.zeros(N, bool)), blend_model_of(model)
    config = BlendConfig(share=0.3, surroundings=False)
    made = plan_cache(parts, ids[0].tolist(), [[(0, state)]], donors, found, needed, config)
    assert made.cache.plan.attention is not None
    held = torch.stack([torch.stack([layer.keys, layer.values]) for layer in made.cache.blends], 1)[:, :, 0]
    assert torch.equal(held, rearrange(parts, [[(0, state)]], donors, found, "cpu", torch.float32))
