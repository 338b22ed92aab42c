"""Encoder outputs and weights: an output of other weights than the model's is never filed as theirs, nor served after a reset."""

import torch
from test_vllm_images import OPTIONS, PICTURES, _encoder, _one, _reset
from vllm_harness import running


def _tower(engine):
    """The parameters of everything that makes an encoder's output."""
    model = engine.core.model_executor.driver_worker.worker.model_runner.get_model()
    return [value for name, value in model.named_parameters() if "vision" in name and value.numel() > 1]


@torch.no_grad()
def _flip(engine):
    """Other weights; flipped once more they are the first ones again."""
    for weight in _tower(engine):
        weight.data.copy_(weight.data.flip(0).neg())


def test_encoder_outputs_of_other_weights(tmp_path):
    """Pictures before an update, after it, after it was taken back, and after a restart."""
    asked = [_one(picture) for picture in PICTURES[:3]]
    with running(connector=False, **OPTIONS) as engine:
        old = [output.tokens for output in engine.ask(asked, max_tokens=8)]
        _flip(engine)
        _reset(engine)
        new = [output.tokens for output in engine.ask(asked, max_tokens=8)]
    assert old != new, "the update must show"
    encoder = {"store_dir": str(tmp_path)}

    def answers(engine):
        found = [output.tokens for output in engine.ask(asked, max_tokens=8)]
        _encoder().flush()
        return found, _encoder().encoded

    with running(connector=False, encoder=encoder, **OPTIONS) as engine:
        assert answers(engine) == (old, 3)
        _reset(engine)
        engine.ask([_one(PICTURES[3])])  # the first step after a reset: the worker says what weights it has
        assert answers(engine) == (old, 4), "an emptied cache is no update"
        _flip(engine)
        _reset(engine)
        assert answers(engine) == (new, 7)
        _reset(engine)
        assert answers(engine) == (new, 10), "where it cannot be known, it is computed"
        _flip(engine)
        _reset(engine)
        engine.ask([_one(PICTURES[3])])
        assert answers(engine)[0] == old
        _flip(engine)
        engine.ask([_one(PICTURES[4])])  # without a reset: it is not filed
        _encoder().flush()
    with running(connector=False, encoder=encoder, **OPTIONS) as engine:
        assert answers(engine) == (old, 0)
        engine.ask([_one(PICTURES[4])])
        assert _encoder().encoded == 1
