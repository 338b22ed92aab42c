"""Values anywhere on a model: a change is noticed at the next use, and after a restart, or nothing is reused."""

import collections
import dataclasses
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import Numbers, number_prompt, right, tiny_llama
from torch import nn

import dejakv
from dejakv.engines.transformers import TransformersEngine
from dejakv.records import Record


class Holder(nn.Module):
    """Scales by what it holds."""

    def __init__(self, inner: nn.Module, held: Any, kind: str) -> None:
        super().__init__()
        self.inner, self.held, self.kind = inner, held, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * CASES[self.kind].read(self.held)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass(slots=True)
class Slots:
    value: float


Named = collections.namedtuple("Named", "value")
T = torch.tensor


class Case:
    """make(1.0) is held first, `change` makes it 4.0; `reused`: whether a model with it is served from state."""

    def __init__(self, make: Any, read: Any, change: Any, reused: bool = True) -> None:
        self.make, self.read, self.change, self.reused = make, read, change, reused


def replaced(make: Callable[[float], Any]) -> Callable[[Holder], None]:
    return lambda holder: setattr(holder, "held", make(4.0))


def set_at(key: Any, value: Any, *path: Any) -> Callable[[Holder], None]:
    def change(holder: Holder) -> None:
        held = holder.held
        for step in path:
            held = held[step]
        held[key] = value

    return change


def set_value(value: Any, *path: str) -> Callable[[Holder], None]:
    def change(holder: Holder) -> None:
        held = holder.held
        for step in path:
            held = getattr(held, step)
        held.value = value

    return change


def counted(value: float) -> Any:
    return collections.defaultdict(float, a=value)


def array(value: float) -> Any:
    return np.array([value], np.float32)


CASES = {
    "float in a nested dict": Case(lambda v: {"a": {"b": v}}, lambda h: h["a"]["b"], set_at("b", 4.0, "a")),
    "tensor in a list": Case(lambda v: [T(v)], lambda h: h[0], set_at(0, T(4.0))),
    "tensor in a nested dict": Case(lambda v: {"a": {"b": T(v)}}, lambda h: h["a"]["b"], set_at("b", T(4.0), "a")),
    "tensor in an object": Case(lambda v: Plain(T(v)), lambda h: h.value, set_value(T(4.0))),
    "tensor in an object, in place": Case(lambda v: Plain(T(v)), lambda h: h.value, lambda m: m.held.value.fill_(4.0)),
    "float in an object": Case(Plain, lambda h: h.value, set_value(4.0)),
    "float in an object in an object": Case(
        lambda v: Plain(Plain(v)), lambda h: h.value.value, set_value(4.0, "value")
    ),
    "object exchanged in an object": Case(lambda v: Plain(Plain(v)), lambda h: h.value.value, set_value(Plain(4.0))),
    "float in slots": Case(Slots, lambda h: h.value, set_value(4.0), reused=False),
    "array in place": Case(array, lambda h: float(h[0]), set_at(0, 4.0)),
    "array replaced": Case(array, lambda h: float(h[0]), replaced(array)),
    "deque": Case(lambda v: collections.deque([v]), lambda h: h[0], set_at(0, 4.0), reused=False),
    "bytearray": Case(lambda v: bytearray([int(v)]), lambda h: h[0], set_at(0, 4), reused=False),
    "named tuple": Case(Named, lambda h: h.value, replaced(Named)),
    "defaultdict": Case(counted, lambda h: h["a"], set_at("a", 4.0)),
    "decimal": Case(decimal.Decimal, float, replaced(decimal.Decimal), reused=False),
    "generator": Case(
        lambda v: torch.Generator().manual_seed(int(v)),
        lambda h: 1.0 + h.initial_seed() % 5,
        lambda m: m.held.manual_seed(4),
        reused=False,
    ),
    "module in a list": Case(
        lambda v: [nn.Linear(1, 1, bias=False).requires_grad_(False)],
        lambda h: h[0].weight[0, 0],
        lambda m: m.held[0].weight.fill_(4.0),
    ),
}


def holding(kind: str, value: float) -> Any:
    model = tiny_llama()
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = Holder(layer.mlp, CASES[kind].make(value), kind)
    return model


PROMPTS = [number_prompt(20, seed) for seed in range(2)]


def ask_all(model: Any, cache: Any, records: list[Record]) -> tuple[int, int]:
    """Wrong answers and hits."""
    records.clear()
    wrong = sum(not right(model, ids) for ids in PROMPTS)
    cache.flush()
    return wrong, sum(record.method == "exact" for record in records)


@pytest.mark.parametrize("kind", CASES)
def test_a_value_of_ones_own_class_is_noticed_wherever_it_is(kind: str) -> None:
    case, records = CASES[kind], list[Record]()
    model = holding(kind, 1.0)
    with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
        hits = len(PROMPTS) if case.reused else 0
        assert ask_all(model, cache, records) == (0, 0)
        assert ask_all(model, cache, records) == (0, hits)
        for layer in model.model.layers:
            case.change(layer.mlp)
        assert ask_all(model, cache, records) == (0, 0)
        assert ask_all(model, cache, records) == (0, hits)


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "module in a list"])
def test_a_value_that_was_another_before_a_restart_finds_nothing(kind: str) -> None:
    engines = [TransformersEngine(holding(kind, v), Numbers(), check=False) for v in (1.0, 4.0, 1.0)]
    first, other, again = (engine.epoch for engine in engines)
    assert first == again
    assert (first != other) == CASES[kind].reused
    assert bool(first) == CASES[kind].reused
