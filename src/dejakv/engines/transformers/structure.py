"""What a model is besides its weights: its modules, their attributes and configurations, adapters, and all code."""

import functools
import json
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dejakv.engines.transformers.attributes import Described, counts
from dejakv.engines.transformers.foreign import home, in_library, installed
from dejakv.identity import digest_of

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Structure:
    """A model as it was when this was made. `unchanged` compares with what it is now, fast enough for every request.

    digest   fingerprint of all that is not a weight: code, scalars and containers on modules (a norm's epsilon, an
             adapter's scaling, whether it is merged or off), configurations, shared parameters; equal in every process
    names    one for each tensor of `tensors`
    foreign  why the state of this model cannot be identified; empty if it can

    trusted  modules and packages whose code counts as understood, by name
    """

    def __init__(self, model: nn.Module, processor: Any = None, trusted: frozenset[str] = frozenset()) -> None:
        described = Described(dict(model.named_modules()), trusted)
        first: dict[int, str] = {}
        text: list[Any] = []
        names: list[str] = []
        listed = list(described.modules.items())
        for name, module in listed:  # grows where a module is found that no other has registered
            without = _made_anew if changes_with_length(module) else None
            described.watch(vars(module), without)
            described.watch(module._modules)
            held = [(f"{name}.{key}", tensor) for key, tensor in _tensors_of(module)]
            names += [path for path, _ in held]
            shared = [first.setdefault(id(tensor), path) for path, tensor in held if tensor is not None]
            carried = [described.tensor_kind(tensor, path) for path, tensor in held if tensor is not None]
            text.append([name, described.kind(type(module), name), shared, carried])
            for key, value in sorted(vars(module).items()):
                if counts(key) and not (without and without(key)):
                    text.append([key, described.text(value, f"{name}.{key}")])
                elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                    described.text(value, f"{name}.{key}")
            text.append(
                _hooks(described, [vars(module)[key] for key in _HOOKS], f"a forward hook of {name or 'the model'}")
            )
            listed += list(described.modules.items())[len(listed) :]
        everywhere = nn.modules.module
        found = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        text.append(_hooks(described, found, "a forward hook of every module"))
        parts = [part for name in _PROCESSOR_PARTS if (part := getattr(processor, name, None)) is not None]
        text += [described.kind(type(part), "the processor") for part in parts]
        self._modules = [module for _, module in listed]
        self._classes = [type(module) for module in self._modules]
        text += [described.classes(), *_functions(described, self._classes)]
        self._loose = list(described.tensors.values())
        self.names = (*names, *described.tensors)
        self.foreign = described.foreign
        self.digest = digest_of(json.dumps(text))
        for part in parts:
            described.text(part, "the processor")  # watched here; what of it counts is in `processor_digest`
        if processor is not None:
            described.watch(vars(processor))
        self._watcher = described.watcher()

    def tensors(self) -> list[torch.Tensor | None]:
        """Parameters, buffers (persistent or not) and tensors that are plain attributes, as the modules hold them now.

        A parameter that modules share comes more than once.
        """
        return [tensor for module in self._modules for _, tensor in _tensors_of(module)] + self._loose

    def unchanged(self) -> bool:
        """Whether the model is still what it was, weights aside."""
        return self._classes == [type(module) for module in self._modules] and self._watcher.unchanged()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    if not changes_with_length(module):
        yield from module._buffers.items()
    else:
        yield from ((name, tensor) for name, tensor in module._buffers.items() if not _made_anew(name))


def changes_with_length(module: nn.Module) -> bool:
    """Whether a rotary module makes its table anew for the length of each prompt (longrope, dynamic NTK)."""
    kinds = vars(module).get("rope_type", "")
    return any(by_length(str(kind)) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def by_length(kind: str) -> bool:
    """Whether rotary tables of this kind depend on a prompt's length."""
    return "dynamic" in kind or kind in ("longrope", "su")


def _made_anew(name: str) -> bool:
    made = name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    return made and "original" not in name


def _hooks(described: Described, hooks: list[Any], path: str) -> list[Any]:
    found: list[Any] = []
    for held in hooks:
        described.watch(held)
        found.append([text for hook in held.values() if (text := described.text(hook, path)) != "dejakv"])
    return found


def _functions(described: Described, classes: Iterable[type]) -> Iterator[Any]:
    """The functions that the modules' own files call, and the attention function: one may have been replaced."""
    for name in sorted({kind.__module__ for kind in classes}):
        module = sys.modules.get(name)
        if module is None or not in_library(name) or home(name) in ("torch", "dejakv"):
            continue
        described.watch(vars(module))
        for key, value in sorted(vars(module).items()):
            if isinstance(value, types.FunctionType) and not installed(value):
                yield [name, key, described.text(value, f"{name}.{key}")]
    for held in (ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping):
        described.watch(held)
        yield described.text(held.get("sdpa"), "the attention function sdpa")
