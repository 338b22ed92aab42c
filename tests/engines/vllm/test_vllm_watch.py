"""Which changes of weights are noticed, without an engine."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.engines.vllm.generations import WeightDigests

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def _model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    sizes = [(300, 257), (7,), (1,), ()]
    values = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    model = torch.nn.ParameterList([torch.nn.Parameter(value, requires_grad=False) for value in values])
    model.register_buffer("scale", torch.ones(3))
    return model


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 300 * 257 - 1), st.integers(0, 7))
def test_a_reading_sees_every_bit(dtype, place, bit):
    model = _model(dtype)
    weights = WeightDigests(model)
    data = model[0].data.view(-1)[place : place + 1].view(torch.uint8)
    data[0] ^= 1 << bit  # through `.data`: no version counter
    assert not weights.are_those_of_the_start()
    data[0] ^= 1 << bit
    assert weights.are_those_of_the_start()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_look_sees_what_writes_many_values(dtype):
    model = _model(dtype)
    weights = WeightDigests(model)
    assert not weights.changed(waiting=True)
    data = model[0].data.view(torch.uint8)
    data.copy_(data ^ 1)
    assert weights.changed(waiting=True)
    assert not weights.changed(waiting=True), "a look compares with the latest reading"
    assert not weights.are_those_of_the_start()


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0][5, 5].add_(1),
        lambda model: setattr(model, "scale", torch.zeros(3)),
        lambda model: model.scale.mul_(2),
        lambda model: setattr(model[1], "data", torch.zeros(7)),
    ],
)
def test_a_look_sees_one_value_that_leaves_a_trace(change):
    model = _model()
    weights = WeightDigests(model)
    change(model)
    assert weights.changed(waiting=True)


@torch.no_grad()
def test_a_look_is_not_taken_in_by_what_changes_nothing():
    model = _model()
    weights = WeightDigests(model)
    model[0].copy_(model[0].clone())
    model.scale = torch.ones(3)
    assert not weights.changed(waiting=True)
    assert weights.are_those_of_the_start()
