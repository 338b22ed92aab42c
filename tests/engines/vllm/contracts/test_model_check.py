"""A model that would be blended wrongly is found out with a stored prompt, before it is blended: the prompt is computed, and the reason told.

Faults are put into what runs the model or moves its keys.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import BLENDING, EXTENSION, Engine, Output, changed, running, tokens

from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import RowForward

SHORT, LONG = tokens(100, 12), tokens(401, 11)
OFF = "blend was switched off"
Patch = pytest.MonkeyPatch


def blend(engine: Engine, prompt: list[int]) -> Output:
    engine.settle()
    engine.reset_prefix_cache()
    return engine.ask([changed(prompt, 0.2, 13)], wish={"mode": "blend", "no_store": True})[0]


def asked(*donors: list[int]) -> list[dict[str, Any]]:
    """What is told of a blend of each, and of one more of the last; none that is refused may change an answer."""
    with running(extra=BLENDING, worker_extension_cls=EXTENSION) as engine:
        engine.ask(list(donors))
        outputs = [blend(engine, donor) for donor in [*donors, donors[-1]]]
        truths = engine.ask([changed(donor, 0.2, 13) for donor in donors], wish={"mode": "off"}, salt="truth")
    for output, truth in zip(outputs, [*truths, truths[-1]], strict=True):
        assert output.told["method"] == "blend" or output.tokens == truth.tokens
    return [output.told for output in outputs]


def unmoved_layer(rotary: LayerRotaryTables, keys: Any, source: Any, target: Any, move: Callable[..., None]) -> None:
    """As in a model of which some layers do not rotate, or rotate by another rule."""
    before = keys[2].clone()
    move(rotary, keys, source, target)
    keys[2] = before


def backwards(rotary: LayerRotaryTables, keys: Any, source: Any, target: Any, move: Callable[..., None]) -> None:
    move(rotary, keys, target, source)


@pytest.mark.parametrize("fault", [unmoved_layer, backwards])
def test_keys_that_are_rotated_otherwise_than_they_are_moved(fault: Callable[..., None], monkeypatch: Patch) -> None:
    move = LayerRotaryTables.move
    monkeypatch.setattr(LayerRotaryTables, "move", lambda *given: fault(*given, move))
    for told in asked(LONG):
        assert told["method"] == "none"
        assert OFF in told["reason"]
        assert "computed again further on is not its moved self" in told["reason"]


def test_a_forward_that_differs_far_into_a_prompt(monkeypatch: Patch) -> None:
    """As of a backend that attends to no more than 300 tokens: a shorter prompt is blended before that shows."""
    forward = RowForward.forward
    monkeypatch.setattr(
        RowForward, "forward", lambda self, batch: (batch.lengths.clamp_(max=300), forward(self, batch))
    )
    short, *later = asked(SHORT, LONG)
    assert short["method"] == "blend"
    for told in later:
        assert told["method"] == "none"
        assert f"{OFF}: recomputing the end of a stored state" in told["reason"]


def test_a_check_that_an_error_ended_is_made_again(monkeypatch: Patch) -> None:
    """The second of its two forwards, say for want of memory."""
    run, move, calls = RowForward.run, LayerRotaryTables.move, itertools.count()

    def run_or_fail(*given: Any, **hooks: Any) -> None:
        if next(calls) == 1:
            raise MemoryError
        run(*given, **hooks)

    monkeypatch.setattr(RowForward, "run", run_or_fail)
    monkeypatch.setattr(LayerRotaryTables, "move", lambda *given: backwards(*given, move))
    first, second = asked(LONG)
    assert first["reason"] == "the load failed: MemoryError"
    assert OFF in second["reason"]
