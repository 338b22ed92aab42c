"""A model apart from its weights: understood once, by one walk over all that hangs on it, and watched from then on.

The walk knows an allow-list: tensors, plain values and containers of them, configurations and other objects of known libraries, code
of known libraries or trusted (`libraries`). Anything else makes a model's state unidentifiable. The containers that it met are the
list that `Structure.unchanged` looks at before each use.
"""

import enum
import functools
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dejakv.engines.transformers.libraries import (
    KNOWN,
    code_digest,
    home,
    in_library,
    installed,
    is_trusted,
    of_library,
    source_digest,
)
from dejakv.identity import digest_of

IGNORED = frozenset(vars(nn.Module())) - {"training"} | {
    # where a model was loaded from, and bookkeeping of transformers and accelerate
    "name_or_path", "_name_or_path", "_model_name_or_path", "base_model_name_or_path", "transformers_version", "_commit_hash",
    "architectures", "generation_config", "loss_type", "all_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules", "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_weight_conversions",
    "_is_hf_initialized", "_output_capturing_hooks_installed", "generate", "__getstate__",
}  # fmt: skip
"""Attributes without effect on the computation, or described in another way."""
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    range, slice, re.Pattern, type(Ellipsis), type(NotImplemented),
)  # fmt: skip
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MAKE_MODULES = frozenset({"__init__", "__setstate__"})
"""Of `nn.Module`: the first `torch.compile` of a process replaces these. They compute nothing."""
_OWN_HOOK = "dejakv"
"""Text of DejaKV's hooks, which come and go and change nothing."""

Leave = Callable[[str], bool]


def plain(value: Any) -> bool:
    """Whether a value is nothing but itself: it never changes, and its `repr` is the same in every process."""
    return type(value) in _VALUES or isinstance(value, enum.Enum | np.generic | pathlib.PurePath)


class Structure:
    """A model as it was when this was made.

    digest   fingerprint of all that is not a weight: classes and their code, values on modules (a norm's epsilon, an adapter's
             scaling), configurations, shared parameters, the processor's settings; equal in every process
    names    of `tensors`
    foreign  why the state of this model cannot be identified: the first thing that is not understood; empty if all is
    trusted  modules and packages whose code counts as understood, by name
    """

    def __init__(self, model: nn.Module, processor: Any = None, trusted: frozenset[str] = frozenset()) -> None:
        self.foreign, self.names, self._trusted = "", list[str](), trusted
        self._parts = {id(module) for module in model.modules()}
        self._modules: list[nn.Module] = []
        self._registers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self._loose: dict[str, Tensor] = {}
        self._classes: dict[type, Any] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, whose id is its own as long as it lives
        self._watched: list[_Watched] = []
        self._sets: list[tuple[Any, Any]] = []
        everywhere = nn.modules.module
        text = [self._text(model, "")]
        text += self._hooks([everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks], "every module")
        text += self._processor(processor)
        text += self._functions()
        text += sorted(self._classes.values(), key=str)
        self.digest = digest_of(json.dumps(text))
        self.names += self._loose
        self._kinds = [type(module) for module in self._modules]
        self._watcher = _Watcher(self._watched)

    def tensors(self) -> list[Tensor | None]:
        """Parameters, buffers (persistent or not) and tensors that are plain attributes, as the modules hold them now; None for empty
        slots.

        A parameter that modules share comes more than once.
        """
        held = (vars(module)[kind].values() for module, kinds in self._registers for kind in kinds)
        return [*chain.from_iterable(held), *self._loose.values()]

    def unchanged(self) -> bool:
        """Whether the model is still what it was, weights aside. Fast enough for every request."""
        return (
            all(map(is_, map(type, self._modules), self._kinds))
            and all(now == was for now, was in self._sets)
            and self._watcher.unchanged()
        )

    def _watch(self, held: Any, leave: Leave | None = None) -> None:
        """Looks at the items of a dictionary or a list from now on, but for those to leave out."""
        self._watched.append(_Watched(held, leave))

    def _unknown(self, reason: str) -> str:
        self.foreign = self.foreign or reason
        return "?"

    def _text(self, value: Any, path: str) -> Any:
        """JSON-able; equal values of two processes give equal text."""
        if plain(value):
            return f"{type(value).__qualname__} {value!r}"
        if isinstance(value, type):
            known = in_library(value.__module__) or is_trusted(value.__module__, self._trusted)
            return _name(value) if known else self._unknown(f"{path} is the class {_name(value)}")
        if isinstance(value, _CODE):
            return self._code(value, path)
        if isinstance(value, types.BuiltinFunctionType):
            name = f"{value.__module__}.{value.__qualname__}"
            return name if in_library(name) else self._unknown(f"{path} is {name}, which is no library's code")
        if id(value) in self._seen:
            return f"object {self._seen[id(value)][0]}"
        self._note(value)
        if isinstance(value, Tensor):
            self._loose[path] = value
            return ["tensor", self._tensor(value, path)]
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if type(value) in (list, tuple):
            self._watch(value)
            return [self._text(item, f"{path}.{index}") for index, item in enumerate(value)]
        if type(value) in (set, frozenset):
            self._sets.append((value, type(value)(value)))
            return sorted(str(self._text(item, path)) for item in value)
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.writeable:
            self._loose[path] = torch.from_numpy(value)
            return "array"
        return self._object(value, path)

    def _note(self, value: Any) -> None:
        self._seen[id(value)] = len(self._seen), value

    def _items(self, value: Mapping[Any, Any], path: str, leave: Leave | None = None) -> list[Any]:
        named = {str(name): item for name, item in value.items() if _counts(name, leave)}
        return [[name, self._text(named[name], f"{path}.{name}" if path else name)] for name in sorted(named)]

    def _module(self, module: nn.Module, path: str) -> Any:
        self._parts.add(id(module))
        self._modules.append(module)
        leave = made_anew if changes_with_length(module) else None
        self._watch(vars(module), leave)
        self._watch(module._modules)
        kinds = (
            ("_parameters",) if leave else ("_parameters", "_buffers")
        )  # a length's tables are in its prompts' epochs
        self._registers.append((module, kinds))
        carried: list[Any] = []
        for name, tensor in chain.from_iterable(vars(module)[kind].items() for kind in kinds):
            self.names.append(f"{path}.{name}")
            if tensor is not None and id(tensor) not in self._seen:
                self._note(tensor)
                carried.append([name, self._tensor(tensor, f"{path}.{name}")])
            elif tensor is not None:
                carried.append([name, self._seen[id(tensor)][0]])
        return [
            self._kind(type(module), path),
            carried,
            self._items(vars(module), path, leave),
            self._hooks([vars(module)[name] for name in _HOOKS], path or "the model"),
            [[name, self._text(part, f"{path}.{name}" if path else name)] for name, part in module._modules.items()],
        ]

    def _tensor(self, value: Tensor, path: str) -> Any:
        """A tensor's class and what else it carries: a quantized tensor its scales."""
        held = {name: item for name, item in vars(value).items() if _counts(name)}
        if held:
            self._watch(vars(value))
        if type(value) in (Tensor, nn.Parameter, nn.Buffer) and not held:
            return ""
        return [self._kind(type(value), path), self._items(held, path)]

    def _hooks(self, hooks: list[Any], where: str) -> list[Any]:
        found: list[Any] = []
        for held in hooks:
            self._watch(held)
            texts = [self._text(hook, f"a forward hook of {where}") for hook in held.values()]
            found.append([text for text in texts if text != _OWN_HOOK])
        return found

    def _processor(self, processor: Any) -> list[Any]:
        """How pictures are cut, scaled and counted."""
        if processor is None:
            return []
        self._watch(vars(processor))
        parts = (getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor"))
        own = {name: value for name, value in vars(processor).items() if plain(value)}
        return [self._items(own, ""), *(self._text(part, "the processor") for part in parts)]

    def _functions(self) -> Iterator[Any]:
        """The functions that the modules' own files call, and the attention function: they may have been replaced."""
        for name in sorted({type(module).__module__ for module in self._modules}):
            module = sys.modules.get(name)
            if module is None or not in_library(name) or home(name) in ("torch", "dejakv"):
                continue
            self._watch(vars(module))
            for key, value in sorted(vars(module).items()):
                if isinstance(value, types.FunctionType) and not installed(value):
                    yield [name, key, self._text(value, f"{name}.{key}")]
        for held in (ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping):
            self._watch(held)
            yield self._text(held.get("sdpa"), "the attention function sdpa")

    def _object(self, value: Any, path: str) -> Any:
        backend = getattr(value, "_torchdynamo_orig_backend", None) or getattr(value, "callback", None)
        if home(type(value).__module__) == "torch" and backend is not None:  # of torch.compile: the backend counts
            while hasattr(backend, "_torchdynamo_orig_backend"):
                backend = backend._torchdynamo_orig_backend
            return ["compiled", self._text(backend, path)]
        read = [vars(value)] if hasattr(value, "__dict__") and not isinstance(value, list | tuple) else []
        read += [value] if isinstance(value, dict) else []
        if not read:
            return self._unknown(f"{path or 'the model'} holds a {_name(type(value))}")
        for items in read:
            self._watch(items)
        made = self._text(getattr(value, "default_factory", None), path)
        return [self._kind(type(value), path), made, *(self._items(items, path) for items in read)]

    def _code(self, value: Any, path: str, *, member: bool = False) -> Any:
        """A function, method or partial: a library's by its name, a trusted one by its code; with its closure.

        member  of a library's class, where only other code in the closure counts
        """
        if isinstance(value, functools.partial):
            return [
                "partial",
                self._text(value.func, path),
                self._text(value.args, path),
                self._items(value.keywords, path),
            ]
        if isinstance(value, types.MethodType):
            owner = value.__self__
            if isinstance(owner, nn.Module) and id(owner) not in self._parts:
                return self._unknown(f"{path} is a method of {_name(type(owner))}, which is no part of the model")
            return [self._text(owner, path), self._text(value.__func__, path)]
        named = f"{value.__globals__.get('__name__', '')}.{value.__code__.co_qualname}"
        if of_library(value):
            if home(named) == "dejakv" and "<" in named:
                return _OWN_HOOK
            if "<" in named:
                named = f"{named}:{value.__code__.co_firstlineno}"
            if hasattr(value, "_torchdynamo_orig_callable"):
                cells = {name: cell for name, cell in _cells(value) if hasattr(cell, "_torchdynamo_orig_backend")}
                return ["compiled", self._text(value._torchdynamo_orig_callable, path), self._items(cells, path)]
        elif is_trusted(str(value.__globals__.get("__name__")), self._trusted):
            defaults = self._text([value.__defaults__, value.__kwdefaults__], path)
            named = f"{named} {code_digest(value.__code__)} {source_digest(value.__globals__['__name__'])} {defaults}"
        else:
            return self._unknown(
                f"{path or 'the model'} runs {named.removeprefix('.')}, which is no library's code: {_trust(value.__module__)}"
            )
        if value.__closure__ is None or id(value) in self._seen:
            return named
        self._note(value)
        if member:
            functions = [(name, cell) for name, cell in _cells(value) if isinstance(cell, types.FunctionType)]
            return [named, [[name, self._code(cell, path, member=True)] for name, cell in functions]]
        return [named, [[name, self._text(cell, f"{path}({name})")] for name, cell in _cells(value)]]

    def _kind(self, kind: type, path: str) -> str:
        """A class that computes, by its name; its code along all bases is in `_classes`."""
        for base in kind.__mro__[:-1]:
            if base not in self._classes:
                self._classes[base] = _name(base)  # a class may hold itself
                self._classes[base] = self._members(base, path)
        return _name(kind)

    def _members(self, kind: type, path: str) -> Any:
        trusted = is_trusted(kind.__module__, self._trusted)
        if not trusted and not in_library(kind.__module__):
            return self._unknown(
                f"{path or 'the model'} is a {_name(kind)}, which is no library's class: {_trust(kind.__module__)}"
            )
        if home(kind.__module__) not in KNOWN and not trusted:
            return _name(kind)  # Python's own
        leave = _MAKE_MODULES.__contains__ if kind is nn.Module else None
        self._watch(vars(kind), leave)
        own = {name: value for name, value in vars(kind).items() if not (leave and leave(name))}
        held = [[name, self._member(value, f"{_name(kind)}.{name}", trusted)] for name, value in own.items()]
        return [
            [_name(base) for base in kind.__mro__],
            sorted((item for item in held if item[1]), key=lambda item: item[0]),
        ]

    def _member(self, value: Any, path: str, trusted: bool) -> Any:
        """A class attribute: its code, and in a trusted class its values too."""
        if isinstance(value, staticmethod | classmethod):
            return self._member(value.__func__, path, trusted)
        if isinstance(value, property):
            return [self._member(part, path, trusted) for part in (value.fget, value.fset) if part is not None]
        if isinstance(value, functools.cached_property):
            return self._member(value.func, path, trusted)
        if isinstance(value, _CODE):
            return self._code(value, path, member=not trusted)
        if trusted and _counts(path.rpartition(".")[2]) and not path.endswith("__"):
            return self._text(value, path)
        if callable(value) and not isinstance(value, type) and not in_library(type(value).__module__):
            return self._unknown(f"{path} is a {_name(type(value))}")
        return ""


def _trust(module: object) -> str:
    return f"if you know what it computes, give `attach` trusted=[{str(module)!r}]"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """A function's closure, by name; a cell that is not set yet is left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _counts(name: Any, leave: Leave | None = None) -> bool:
    """Whether an attribute of this name decides what a model computes."""
    return name not in IGNORED and not (leave is not None and leave(name))


class _Watched:
    """A dictionary or a list, with its former items."""

    def __init__(self, held: Any, leave: Leave | None) -> None:
        self.held, self.leave = held, leave
        self.views = (held,) if isinstance(held, list | tuple) else (held.keys(), held.values())
        self.was = [list(view) for view in self.views]

    def same(self) -> bool:
        """Whether all counted items are unchanged: plain values by type and value, all others by identity."""
        if len(self.views) == 1:
            return len(self.held) == len(self.was[0]) and all(map(_same, self.held, self.was[0]))
        was = {name: value for name, value in zip(*self.was, strict=True) if _counts(name, self.leave)}
        now = {name: value for name, value in self.held.items() if _counts(name, self.leave)}
        return was.keys() == now.keys() and all(_same(now[name], value) for name, value in was.items())


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and plain(one) and one == other)


class _Watcher:
    """Compares all containers with their former content: one pass over the identities of their items."""

    def __init__(self, watched: list[_Watched]) -> None:
        self._restless = [one for one in watched if one.leave is not None]
        self._quiet = [one for one in watched if one.leave is None]
        self._flatten()

    def _flatten(self) -> None:
        self._views = [view for one in self._quiet for view in one.views]
        self._flat = [item for one in self._quiet for was in one.was for item in was]

    def unchanged(self) -> bool:
        if not all(one.same() for one in self._restless):
            return False
        now = chain.from_iterable(self._views)
        if sum(map(len, self._views)) == len(self._flat) and all(map(is_, now, self._flat)):
            return True
        if not all(one.same() for one in self._quiet):
            return False
        self._quiet = [_Watched(one.held, None) for one in self._quiet]  # values that are equal, or do not count
        self._flatten()
        return True


def by_length(kind: str) -> bool:
    """Whether rotary tables of this kind depend on a prompt's length."""
    return "dynamic" in kind or kind in ("longrope", "su")


def changes_with_length(module: nn.Module) -> bool:
    """Whether a rotary module makes its table anew for the length of each prompt."""
    kinds = vars(module).get("rope_type", "")
    return any(by_length(str(kind)) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def made_anew(name: str) -> bool:
    """Whether such a module writes the attribute of this name for each prompt."""
    return name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling")) and "original" not in name
