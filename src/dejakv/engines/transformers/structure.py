"""What a model is besides its weights: its modules, their attributes and configurations, adapters, and foreign code."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dejakv.engines.transformers.attributes import SCALARS, Described, kept, own_attributes, simple
from dejakv.engines.transformers.foreign import foreign_code, hooks_of
from dejakv.identity import digest_of

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor")


class Structure:
    """A model as it was when this was made. `unchanged` compares with what it is now, fast enough for every request.

    digest   fingerprint of all that is not a weight: classes, scalars and containers on modules (a norm's epsilon, an
             adapter's scaling, whether it is merged or off), configurations, shared parameters; equal in every process
    names    one for each tensor of `tensors`
    foreign  why the state of this model cannot be identified; empty if it can
    """

    def __init__(self, model: nn.Module, processor: Any = None) -> None:
        listed = list(model.named_modules())
        described = Described()
        self._modules = [module for _, module in listed]
        self._scalars: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._containers: list[tuple[dict[str, Any], str, Any]] = []
        self._others: list[tuple[Any, Any, Any]] = []
        self._objects: list[tuple[Any, int, dict[str, Any]]] = []
        first: dict[int, str] = {}
        text: list[Any] = []
        names: list[str] = []
        for name, module in listed:
            attributes = own_attributes(module)
            self._watch(vars(module), attributes)
            held = [(f"{name}.{key}", tensor) for key, tensor in _tensors_of(module)]
            names += [path for path, _ in held]
            shared = [first.setdefault(id(tensor), path) for path, tensor in held if tensor is not None]
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            text.append([name, kind, described.text(attributes, name), shared])
        self._loose = list(described.tensors.values())
        self.names = (*names, *described.tensors)
        self.digest = digest_of(json.dumps(text))
        self.foreign = foreign_code(listed)
        for part in (getattr(processor, name, None) for name in _PROCESSOR_PARTS):
            described.text(part, "processor")  # watched here; what of it counts is in `processor_digest`
        self._objects += described.objects
        if processor is not None:
            own = {key: value for key, value in vars(processor).items() if isinstance(value, SCALARS)}
            self._objects.append((vars(processor), len(vars(processor)), own))
        self._sizes = [len(vars(module)) for module in self._modules]
        self._now = self._current()

    def tensors(self) -> list[torch.Tensor | None]:
        """Parameters, buffers (persistent or not) and tensors that are plain attributes, as the modules hold them now.

        A parameter that modules share comes more than once.
        """
        groups = (group for module in self._modules for group in (module._parameters, module._buffers))
        return [tensor for group in groups for tensor in group.values()] + self._loose

    def unchanged(self) -> bool:
        """Whether the model is still what it was, weights aside."""
        try:
            return (
                self._sizes == [len(vars(module)) for module in self._modules]
                and self._now == self._current()
                and all(len(holder) == size for holder, size, _ in self._objects)
                and all(holder[key] == was for holder, key, was in self._containers)
                and all(holder[key] is was for holder, key, was in self._others)
                and all(holder[key] == was for holder, _, held in self._objects for key, was in held.items())
            )
        except KeyError:
            return False  # an attribute is gone

    def _current(self) -> list[Any]:
        modules = self._modules
        classes = [type(module) for module in modules]
        return [
            classes,
            [getattr(kind, "forward", None) for kind in dict.fromkeys(classes)],
            [child for module in modules for child in module._modules.values()],
            hooks_of(modules),
            [holder[key] for holder, keys in self._scalars for key in keys],
        ]

    def _watch(self, holder: dict[str, Any], attributes: dict[str, Any]) -> None:
        self._scalars.append((holder, tuple(key for key, value in attributes.items() if isinstance(value, SCALARS))))
        for key, value in attributes.items():
            if isinstance(value, SCALARS):
                continue
            if simple(value):
                self._containers.append((holder, key, kept(value)))
                continue
            self._others.append((holder, key, value))
            if isinstance(value, dict | list | tuple):
                self._objects.append((value, len(value), {}))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                self._others += [(value, place, item) for place, item in items]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
