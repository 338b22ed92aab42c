"""Description of a model by content, its weights apart, and a check that nothing of it changed.

A function is its code object, defaults, closure and what its code names on module level; a class is
its members; a value its content. Nothing counts for what it says of itself: no name, no module, no
file. Native code and what C objects hold are not read.
"""

import enum
import functools
import inspect
import json
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dejakv.engines.transformers.fingerprint.code_objects import (
    closure_cells,
    codes_of,
    functions_of,
    is_native,
    read_code,
    type_name,
)
from dejakv.engines.transformers.fingerprint.content_watch import (
    NOTHING,
    ContentWatch,
    Leave,
    counts,
    foreign_hooks,
    is_plain_value,
)
from dejakv.identity import digest_of

_NATIVE = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodWrapperType,
)  # fmt: skip
_CONTAINERS = (
    object,
    types.SimpleNamespace,
    dict,
    defaultdict,
    OrderedDict,
    list,
    tuple,
    set,
    frozenset,
)
"""Native bases whose content is read."""
_RUN = frozenset(
    {"forward", "prepare_inputs_for_generation", "__call__", "__getattr__", "__getattribute__"}
)
"""Members that a run begins with.

What code names is looked up for these, and for all members whose names they mention.
"""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MAKE_MODULES = frozenset(
    {"__init__", "__setstate__", "__setattr__", "__delattr__", "___needs_generation_tag_patch"}
)
"""Members of `nn.Module` that compute nothing.

The first `torch.compile` of a process, and a run of DejaKV, replace these.
"""
_HOPS = 3
"""Calls of functions by which code is followed from the model's classes.

A function that is further away is its own code alone.
"""


class Contents:
    """A model as it was when this was made.

    Attributes
    ----------
    digest : str
        Fingerprint of all that is not a weight: classes and their code, values on modules (a norm's
        epsilon, an adapter's scaling), configurations, shared parameters, the processor's settings;
        equal in every process.
    watched : ContentWatch
        Tells whether the model is still what it was, and names its tensors.
    foreign : str
        The first thing that cannot be described; empty if all can.
    """

    def __init__(self, model: nn.Module, processor: Any = None) -> None:
        self.foreign = ""
        self._parts = {id(module) for module in model.modules()}
        # With the object, whose id is its own as long as it lives.
        self._seen: dict[int, tuple[int, Any]] = {}
        # Place in `_texts`, and how many classes away.
        self._classes: dict[type, tuple[int, int]] = {}
        self._functions: dict[types.FunctionType, int] = {}
        self._texts: list[Any] = []
        self._waiting: list[tuple[types.FunctionType, int]] = []
        self._followed: dict[types.FunctionType, int] = {}
        self._attributes = set(_RUN)
        self._hops = 0

        self.watched = ContentWatch()
        everywhere = nn.modules.module
        text = [self._description(model, "")]
        text += self._hooks(
            [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks], "every module"
        )
        text += self._processor(processor)

        # Anyone may register another function under this name.
        for table in (
            ALL_ATTENTION_FUNCTIONS._global_mapping,
            ALL_ATTENTION_FUNCTIONS._local_mapping,
        ):
            self.watched.watch_name(table, "sdpa")
            text.append(
                self._description(
                    table.get("sdpa"), "the attention function sdpa", runs_with_model=True
                )
            )
        self._follow()

        self.digest = digest_of(json.dumps([text, self._texts]))
        self.watched.finish_reading()

    def _unknown(self, reason: str) -> str:
        self.foreign = self.foreign or reason
        return "?"

    def _note(self, value: Any) -> None:
        self._seen[id(value)] = len(self._seen), value

    def _description(self, value: Any, path: str, *, runs_with_model: bool = False) -> Any:
        """Return a JSON-able description; equal values of two processes give equal ones.

        Parameters
        ----------
        runs_with_model : bool
            Whether a function here runs with the model, so that what it names counts.
        """
        if is_plain_value(value):
            return f"{type(value).__qualname__} {value!r}"
        if type(value) is re.Pattern:
            return ["pattern", repr(value.pattern), value.flags]
        if isinstance(value, type):
            return self._class(value, self._hops + 1)
        if type(value) is types.FunctionType:
            return self._function(value, path, runs_with_model=runs_with_model, strict=True)
        if type(value) in _NATIVE:
            owner = getattr(value, "__self__", None)
            owned = owner is not None and not isinstance(owner, type | types.ModuleType)
            return [
                type(value).__name__,
                value.__qualname__,
                self._description(owner, path) if owned else "",
            ]
        if isinstance(value, types.ModuleType):
            # What code names in it is looked up where it is named.
            return "module"
        # Shared and circular objects: a number stands for their content.
        if id(value) in self._seen:
            return f"object {self._seen[id(value)][0]}"
        # Before its content is read, which may lead back to it.
        self._note(value)
        if type(value) is types.MethodType:
            if isinstance(value.__self__, nn.Module) and id(value.__self__) not in self._parts:
                return self._unknown(
                    f"{path} is a method of {type_name(type(value.__self__))}, which is no "
                    "part of the model"
                )
            return [
                "method",
                self._description(value.__self__, path),
                self._description(value.__func__, path, runs_with_model=runs_with_model),
            ]

        if type(value) is functools.partial:
            parts = (value.func, value.args, value.keywords)
            return [
                "partial",
                [self._description(part, path, runs_with_model=runs_with_model) for part in parts],
            ]
        if type(value) in (staticmethod, classmethod, property) or isinstance(
            value, functools._lru_cache_wrapper
        ):
            names = ("fget", "fset", "fdel") if isinstance(value, property) else ("__wrapped__",)
            return [
                type(value).__name__,
                [
                    self._description(getattr(value, name), path, runs_with_model=runs_with_model)
                    for name in names
                ],
            ]

        if isinstance(value, Tensor):
            self.watched.watch_tensor(path, value)
            return ["tensor", self._tensor(value, path)]
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.writeable:
            # A tensor on the same memory: a write into the array is noticed.
            self.watched.watch_tensor(path, torch.from_numpy(value))
            return "array"
        if isinstance(value, enum.Enum):
            return [self._class(type(value)), value.name]
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Any:
        """Content of an object: items of containers, attributes, and its class."""
        kind = type(value)
        # Not imported for this: without the module nothing is compiled.
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is not None and isinstance(value, compiler._TorchDynamoContext):
            return [
                "compiled",
                self._description(_innermost(value.callback), path, runs_with_model=True),
            ]

        read: list[Any] = []
        if not _readable(value):
            return self._unknown(
                f"{path or 'the model'} holds a {type_name(kind)}, whose content cannot be read"
            )
        if isinstance(value, set | frozenset):
            self.watched.watch_set(value)
            read.append(sorted(str(self._description(item, path)) for item in value))
        elif isinstance(value, list | tuple):
            self.watched.watch_items(value)
            read += [
                [
                    self._description(item, f"{path}.{index}", runs_with_model=True)
                    for index, item in enumerate(value)
                ]
            ]
        elif isinstance(value, dict):
            read.append(self._items(value, path))

        if hasattr(value, "__dict__"):
            read.append(self._items(vars(value), path))
        default_factory = (
            self._description(value.default_factory, path) if isinstance(value, defaultdict) else ""
        )
        return [self._class(kind), default_factory, read]

    def _items(self, value: Mapping[Any, Any], path: str, leave: Leave | None = None) -> list[Any]:
        self.watched.watch_items(value, leave)
        named = {str(name): item for name, item in value.items() if counts(name, leave)}
        return [
            [
                name,
                self._description(
                    named[name], f"{path}.{name}" if path else name, runs_with_model=True
                ),
            ]
            for name in sorted(named)
        ]

    def _module(self, module: nn.Module, path: str) -> Any:
        self._parts.add(id(module))
        leave = left_by_runs(module)
        # a length's tables are in its prompts' epochs
        kinds = ("_parameters",) if changes_with_length(module) else ("_parameters", "_buffers")
        self.watched.watch_module(module, kinds)

        carried: list[Any] = []
        for name, tensor in chain.from_iterable(vars(module)[kind].items() for kind in kinds):
            self.watched.names.append(f"{path}.{name}")
            if tensor is not None and id(tensor) not in self._seen:
                self._note(tensor)
                carried.append([name, self._tensor(tensor, f"{path}.{name}")])
            elif tensor is not None:
                # Which modules share a tensor (tied weights) is a part of the model.
                carried.append([name, self._seen[id(tensor)][0]])

        parts = module._modules
        self.watched.watch_items(parts)
        return [
            self._class(type(module)),
            carried,
            self._items(vars(module), path, leave),
            self._hooks([vars(module)[name] for name in _HOOKS], path or "the model"),
            [
                [name, self._description(part, f"{path}.{name}" if path else name)]
                for name, part in parts.items()
            ],
        ]

    def _tensor(self, value: Tensor, path: str) -> Any:
        """Describe a tensor's class and what else it carries: a quantized tensor its scales."""
        extra_attributes = {name: item for name, item in vars(value).items() if counts(name)}
        if type(value) in (Tensor, nn.Parameter, nn.Buffer) and not extra_attributes:
            return ""
        return [self._class(type(value)), self._items(vars(value), path)]

    def _hooks(self, tables: Iterable[Any], where: str) -> list[Any]:
        texts: list[Any] = []
        for table in tables:
            self.watched.watch_hooks(table)
            hooks = foreign_hooks(table)
            texts.append(
                [
                    self._description(hook, f"a forward hook of {where}", runs_with_model=True)
                    for hook in hooks
                ]
            )
        return texts

    def _processor(self, processor: Any) -> list[Any]:
        """Describe how pictures are cut, scaled and counted."""
        if processor is None:
            return []
        self.watched.watch_items(vars(processor))
        parts = (
            getattr(processor, name, None)
            for name in ("image_processor", "video_processor", "feature_extractor")
        )
        settings = [
            [name, repr(value)]
            for name, value in sorted(vars(processor).items())
            if is_plain_value(value)
        ]
        return [settings, *(self._description(part, "the processor") for part in parts)]

    def _class(self, kind: type, hops: int | None = None) -> Any:
        """Describe members along all bases, and those of the metaclass.

        Parameters
        ----------
        hops : int or None
            How many classes away; None for the distance of the thing that is read.
        """
        hops = self._hops if hops is None else hops
        for base in (*inspect.getmro(type(kind)), *kind.__mro__):
            # A class that comes nearer than before is read again: more of its code counts now.
            if is_native(base) or hops > _HOPS or self._classes.get(base, (0, hops + 1))[1] <= hops:
                continue
            place = self._classes[base][0] if base in self._classes else len(self._texts)
            revisited, self._classes[base] = base in self._classes, (place, hops)
            if not revisited:
                # Its place first: its members may name the class itself.
                self._texts.append(None)
                outer, self._hops = self._hops, hops
                self._texts[place] = self._members(base)
                self._hops = outer
        return [
            "class",
            *(
                self._classes[base][0] if base in self._classes else type_name(base)
                for base in kind.__mro__
            ),
        ]

    def _members(self, kind: type) -> Any:
        leave = _MAKE_MODULES.__contains__ if kind is nn.Module else None
        self.watched.watch_items(vars(kind), leave)
        named = {name: item for name, item in vars(kind).items() if counts(name, leave)}
        return [
            [name, self._level(named[name], f"{type_name(kind)}.{name}")] for name in sorted(named)
        ]

    def _function(
        self, value: types.FunctionType, path: str, *, runs_with_model: bool, strict: bool = False
    ) -> Any:
        """Describe a function by its place among the texts.

        Parameters
        ----------
        strict : bool
            Whether all of its closure must be readable.
        """
        place = self._functions.get(value)
        if place is None:
            place = self._functions[value] = len(self._texts)
            self._texts.append(None)
            self.watched.watch_function(value)
            self._texts[place] = self._of_function(
                value, path, self._description if strict else self._level
            )
        if runs_with_model and self._hops < self._followed.get(value, _HOPS):
            self._waiting.append((value, self._hops))
        return ["function", place]

    def _of_function(self, value: types.FunctionType, path: str, read: Callable[..., Any]) -> Any:
        # A function of torch.compile is what it compiles, and how.
        if id(value.__code__) in _compilers():
            inner = [cell for name, cell in closure_cells(value) if name in ("fn", "callback")]
            return [
                "compiled",
                [self._description(_innermost(cell), path, runs_with_model=True) for cell in inner],
            ]
        return [
            read_code(value.__code__).digest,
            [read(part, path) for part in (value.__defaults__, value.__kwdefaults__)],
            [[name, read(cell, f"{path}({name})")] for name, cell in closure_cells(value)],
        ]

    def _follow(self) -> None:
        """Describe the closures and globals that the model's functions use, and follow functions.

        Functions up to `_HOPS` calls away are followed, and members of known classes by attribute
        name.
        """
        # Until nothing new is named: each round may add classes and attributes.
        while True:
            while self._waiting:
                function, hops = self._waiting.pop(0)
                if hops >= self._followed.get(function, _HOPS):
                    continue
                self._followed[function] = self._hops = hops
                for name, cell in closure_cells(function):
                    self._level(cell, name, runs_with_model=True)

                # What is named here is a call further away.
                chains, attributes = read_code(function.__code__).looks_up
                self._attributes |= attributes
                self._hops = hops + 1
                named = [
                    [".".join(names), self._named(function.__globals__, names)] for names in chains
                ]
                self._texts.append([self._functions[function], named])

            # A copy: reading members may add classes.
            for kind, (_, hops) in list(self._classes.items()):
                self._hops = hops
                members = vars(kind).keys() - (_MAKE_MODULES if kind is nn.Module else ())
                for name in sorted(self._attributes & members) if hops < _HOPS else ():
                    for function in functions_of(vars(kind)[name]):
                        self._function(function, name, runs_with_model=True)
            if not self._waiting:
                return

    def _named(self, names: dict[str, Any], chained: tuple[str, ...]) -> Any:
        """Describe what a chain of names stands for: `F.silu`, `settings.scale`."""
        holder: Any = names
        value: Any = NOTHING
        for name in chained:
            value = NOTHING
            for table in holder if isinstance(holder, tuple) else (holder,):
                # Noted even where it is missing: one that appears later would come before the next.
                value = self.watched.watch_name(table, name)
                if value is not NOTHING:
                    break

            # Where the next name is looked up: as Python does it, without running code.
            if isinstance(value, types.ModuleType):
                holder = vars(value)
            elif isinstance(value, type):
                holder = tuple(vars(base) for base in value.__mro__ if not is_native(base))
            elif hasattr(type(value), "__dict__") and not is_native(type(value)):
                kinds = tuple(vars(base) for base in type(value).__mro__ if not is_native(base))
                holder = (*([vars(value)] if hasattr(value, "__dict__") else []), *kinds)
            else:
                break

        if value is NOTHING:
            return ""
        return self._level(value, ".".join(chained), runs_with_model=True)

    def _level(self, value: Any, path: str, *, runs_with_model: bool = False) -> Any:
        """Describe a thing on module level, in a class or in its closures.

        What is no value there (loggers, registries, caches) is its class alone.
        """
        if isinstance(value, types.FunctionType):
            return self._function(value, path, runs_with_model=runs_with_model)
        if isinstance(value, type):
            return self._class(value, self._hops + 1)
        if functions := functions_of(value):
            return [
                type_name(type(value)),
                [
                    self._function(function, path, runs_with_model=runs_with_model)
                    for function in functions
                ],
            ]
        if isinstance(value, nn.Module | Tensor) or _simple(value):
            return self._description(value, path, runs_with_model=runs_with_model)
        return type_name(type(value))


def _readable(value: Any) -> bool:
    """Tell whether an object's content is items and attributes.

    It is not where there are slots, or where native code holds it.
    """
    kinds = type(value).__mro__
    return (
        next(filter(is_native, kinds)) in _CONTAINERS
        and type(value) is not object
        and not any(
            type(item) is types.MemberDescriptorType
            for kind in kinds
            if kind not in _CONTAINERS  # `defaultdict.default_factory` is read apart
            for item in vars(kind).values()
        )
    )


def _simple(value: Any, depth: int = 4) -> bool:
    """Tell whether an object consists of plain values, functions and patterns, to some depth."""
    if is_plain_value(value) or type(value) in (types.FunctionType, re.Pattern):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return depth > 0 and all(_simple(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(
            is_plain_value(name) and _simple(item, depth - 1) for name, item in value.items()
        )
    return (
        not is_native(type(value))
        and depth > 0
        and _readable(value)
        and _simple(getattr(value, "__dict__", {}), depth - 1)
    )


def _compilers() -> frozenset[int]:
    """Return the code of `torch.compile`'s own functions."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return _codes_of_compiler() if compiler is not None else frozenset()


@functools.cache
def _codes_of_compiler() -> frozenset[int]:
    return codes_of(vars(sys.modules["torch._dynamo.eval_frame"]))


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def depends_on_length(kind: str) -> bool:
    """Tell whether rotary tables of this kind depend on a prompt's length."""
    return "dynamic" in kind or kind in ("longrope", "su")


def changes_with_length(module: nn.Module) -> bool:
    """Tell whether a rotary module makes its table anew for the length of each prompt."""
    kinds = vars(module).get("rope_type", "")
    return any(
        depends_on_length(str(kind))
        for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


def rewritten_per_prompt(name: str) -> bool:
    """Tell whether such a module writes the attribute of this name for each prompt."""
    return (
        name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
        and "original" not in name
    )


def left_by_runs(module: nn.Module) -> Leave | None:
    """Tell attributes that a model's own runs leave on a module and that no later run reads.

    Beside tables by length: the offset of the last prompt's positions, where pictures take part in
    positions. DejaKV gives each forward its positions. None if there are no such attributes.
    """
    if changes_with_length(module):
        return rewritten_per_prompt
    return "rope_deltas".__eq__ if hasattr(type(module), "get_rope_index") else None
