"""What hangs on modules, as text that is the same in every process, and how to see that it is still the same.

An allow-list: tensors, plain values and containers of them, configurations and other objects of known libraries, code of
known libraries or trusted. Everything else makes a model's state unidentifiable. `__module__` and names tell nothing about
code, since `functools.wraps` copies both: a function is a library's if it was compiled from a file of that library and reads
the names of that library's module.
"""

import collections
import decimal
import enum
import fractions
import functools
import hashlib
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

KNOWN = frozenset({
    "accelerate", "bitsandbytes", "dejakv", "einops", "gguf", "huggingface_hub", "numpy", "peft", "safetensors",
    "sentence_transformers", "timm", "tokenizers", "torch", "torchao", "torchvision", "transformers", "typing_extensions",
})  # fmt: skip
"""Libraries whose releases stand for their code."""
REMOTE = "transformers_modules"
"""Where transformers puts the code of models loaded with `trust_remote_code`: their owner has said that it is trusted."""


def home(name: str) -> str:
    """The top-level package of a module's name."""
    return name.partition(".")[0]


def in_library(name: str) -> bool:
    """Whether a module of this name belongs to a known library or to Python itself."""
    return home(name) in KNOWN or home(name) in sys.stdlib_module_names


def of_library(code: types.FunctionType) -> bool:
    """Whether a function is what a library's own file says."""
    name = str(code.__globals__.get("__name__", ""))
    module = sys.modules.get(name)
    if module is None or vars(module) is not code.__globals__ or not in_library(name):
        return False
    file = code.__code__.co_filename
    return home(name) not in KNOWN or file.startswith(("<", _folder(home(name))))


def installed(code: types.FunctionType) -> bool:
    """Whether a function is a library's or comes from a package that is installed beside them."""
    return of_library(code) or code.__code__.co_filename.startswith(str(Path(_folder("transformers")).parent))


@functools.cache
def _folder(package: str) -> str:
    return str(Path(str(sys.modules[package].__file__)).parent)


def trusted_name(name: str, trusted: frozenset[str]) -> bool:
    """Whether a module of this name is trusted, or is inside a package that is."""
    return home(name) == REMOTE or any(name == given or name.startswith(f"{given}.") for given in trusted)


@functools.cache
def source_digest(name: str) -> str:
    """Over the source files beside a module's own; empty for one that has no file (a notebook's)."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or not Path(file).is_file():
        return ""
    beside = [Path(file)] if name == "__main__" else sorted(Path(file).parent.glob("*.py"))
    sha = hashlib.sha256()
    for path in beside:
        data = path.read_bytes()
        sha.update(f"{path.name}:{len(data)};".encode() + data)
    return sha.hexdigest()


def code_digest(code: types.CodeType) -> str:
    """Over a function's compiled code, equal in every process; line numbers do not count."""
    constants = [code_digest(item) if isinstance(item, types.CodeType) else _constant(item) for item in code.co_consts]
    read = (code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
    return hashlib.sha256(repr(read).encode()).hexdigest()


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


IGNORED = frozenset(vars(nn.Module())) - {"training"} | {
    # where a model was loaded from, and bookkeeping of transformers and accelerate
    "name_or_path", "_name_or_path", "_model_name_or_path", "base_model_name_or_path", "transformers_version", "_commit_hash",
    "architectures", "generation_config", "loss_type", "all_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules", "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_weight_conversions",
    "_is_hf_initialized", "_output_capturing_hooks_installed", "_old_forward", "generate", "get_image_features",
}  # fmt: skip
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    decimal.Decimal, fractions.Fraction, range, slice, re.Pattern, type(Ellipsis), type(NotImplemented),
)  # fmt: skip
_BUILTIN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_MADE_BY = frozenset({"__init__", "__setstate__"})
"""Of `nn.Module`: the first `torch.compile` of a process replaces these. They make modules and compute nothing."""
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter, types.MappingProxyType)
_LISTS = (list, tuple, collections.deque)


def plain(value: Any) -> bool:
    """Whether a value is nothing but itself: it never changes, and its `repr` is the same in every process."""
    return type(value) in _VALUES or isinstance(value, enum.Enum | np.generic | pathlib.PurePath)


class Described:
    """Describes values, and remembers what to look at to see whether they change.

    modules  the model's, with their names; those met elsewhere (in a list, in a closure) are added
    tensors  by path: tensors kept as plain attributes, which `named_buffers` does not list
    foreign  the first thing that is not understood; empty if everything is
    """

    def __init__(self, modules: Mapping[str, nn.Module], trusted: frozenset[str]) -> None:
        self.modules = dict(modules)
        self.tensors: dict[str, torch.Tensor] = {}
        self.foreign = ""
        self._trusted = trusted
        self._names = {id(module): name for name, module in modules.items()}
        self._seen: dict[int, int] = {}
        self._classes: dict[type, Any] = {}
        self._watched: dict[int, _Watched] = {}
        self._copied: list[tuple[Any, Any]] = []

    def watch(self, held: Any, without: Callable[[str], bool] | None = None) -> None:
        """Looks at the items of a dictionary or a list from now on, but for those of these names."""
        self._watched.setdefault(id(held), _Watched(held, without))

    def watcher(self) -> "Watcher":
        return Watcher(list(self._watched.values()), self._copied)

    def classes(self) -> list[Any]:
        """The code of all classes met so far, and of their bases."""
        return sorted(self._classes.values(), key=str)

    def text(self, value: Any, path: str) -> Any:
        """JSON-able; equal values of two processes give equal text."""
        if plain(value):
            return f"{type(value).__qualname__} {value!r}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, type):
            return self._class_named(value, path)
        if isinstance(value, types.GenericAlias | types.UnionType) or type(value).__module__ == "typing":
            return repr(value)
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, _CODE):
            return self.code(value, path)
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__self__", None)
            bound = owner is not None and not isinstance(owner, type | types.ModuleType)
            return [f"{getattr(value, '__module__', '')}.{value.__qualname__}", self.text(owner, path) if bound else ""]
        if id(value) in self._seen:
            return f"object {self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        if type(value) in _DICTS:
            self.watch(value)
            made = self.text(getattr(value, "default_factory", None), path)
            return [made, self._items(value, path)]
        if type(value) in _LISTS:
            self.watch(value)
            return [self.text(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, set | frozenset | bytearray):
            self._copied.append((value, type(value)(value)))
            if isinstance(value, bytearray):
                return value.hex()
            return sorted(str(self.text(item, path)) for item in value)
        if type(value) is np.ndarray:
            return self._array(value, path)
        if isinstance(value, types.ModuleType):
            return (
                value.__name__
                if in_library(value.__name__)
                else self._unknown(f"{path} is the module {value.__name__}")
            )
        if isinstance(value, weakref.ref):
            return ["reference", self.text(value(), path)]
        return self._object(value, path)

    def _unknown(self, reason: str) -> str:
        self.foreign = self.foreign or reason
        return "?"

    def _items(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        named = {str(name): item for name, item in value.items() if counts(name)}
        return [[name, self.text(named[name], f"{path}.{name}" if path else name)] for name in sorted(named)]

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        self.tensors[path] = value
        return ["tensor", self.tensor_kind(value, path)]

    def tensor_kind(self, value: torch.Tensor, path: str) -> Any:
        """A tensor's class and what else it carries: a quantized one its scales."""
        held = {name: item for name, item in vars(value).items() if counts(name)}
        if held:
            self.watch(vars(value))
        if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) and not held:
            return ""
        return [self.kind(type(value), path), self._items(held, path)]

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.kind not in "biufc":
            return self._unknown(f"{path} is an array of {value.dtype}")
        if value.flags.writeable:
            self.tensors[path] = torch.from_numpy(value)
            return "array"
        return ["array", str(value.dtype), value.shape, value.tobytes().hex()]

    def _module(self, value: nn.Module, path: str) -> Any:
        if id(value) not in self._names:  # not registered: it belongs to the model all the same
            for name, module in value.named_modules(prefix=path):
                if id(module) not in self._names:
                    self._names[id(module)] = name
                    self.modules[name] = module
        return ["module", self._names[id(value)]]

    def _object(self, value: Any, path: str) -> Any:
        backend = getattr(value, "_torchdynamo_orig_backend", None) or getattr(value, "callback", None)
        if home(type(value).__module__) == "torch" and backend is not None:  # of torch.compile: the backend counts
            return ["compiled", self.text(_innermost(backend), path)]
        kind = self.kind(type(value), path)
        if not hasattr(value, "__dict__") or (not isinstance(value, dict) and isinstance(value, list | tuple)):
            return self._unknown(f"{path or 'the model'} holds a {_name(type(value))}")
        self.watch(vars(value))
        held = self._items(vars(value), path)
        if isinstance(value, dict):
            self.watch(value)
            held = [held, self._items(value, path)]
        return [kind, held]

    def code(self, value: Any, path: str, *, member: bool = False) -> Any:
        """A function, method or partial: a library's by its name, a trusted one by its code; with what it closes over.

        member  of a library's class, where only other code in the closure counts
        """
        if isinstance(value, functools.partial):
            return [
                "partial",
                self.text(value.func, path),
                self.text(value.args, path),
                self._items(value.keywords, path),
            ]
        if isinstance(value, types.MethodType):
            if home(str(value.__func__.__module__)) == "dejakv" and of_library(value.__func__):
                return "dejakv"
            owner = value.__self__
            if isinstance(owner, nn.Module) and id(owner) not in self._names:
                return self._unknown(f"{path} is a method of {_name(type(owner))}, which is no part of the model")
            return [self.text(owner, path), self.text(value.__func__, path)]
        named = f"{value.__globals__.get('__name__', '')}.{value.__code__.co_qualname}"
        if of_library(value):
            if home(named) == "dejakv" and "<" in named:
                return "dejakv"  # a hook that comes and goes
            if "<" in named:
                named = f"{named}:{value.__code__.co_firstlineno}"
            if hasattr(value, "_torchdynamo_orig_callable"):
                cells = {name: cell for name, cell in _cells(value) if hasattr(cell, "_torchdynamo_orig_backend")}
                return ["compiled", self.text(value._torchdynamo_orig_callable, path), self._items(cells, path)]
        elif trusted_name(str(value.__globals__.get("__name__")), self._trusted):
            defaults = self.text([value.__defaults__, value.__kwdefaults__], path)
            named = f"{named} {code_digest(value.__code__)} {source_digest(value.__globals__['__name__'])} {defaults}"
        else:
            return self._unknown(f"{path or 'the model'} runs {named.removeprefix('.')}, which is no library's code")
        if value.__closure__ is None or id(value) in self._seen:
            return named
        self._seen[id(value)] = len(self._seen)
        cells = [(name, item) for name, item in _cells(value) if not member or isinstance(item, types.FunctionType)]
        return [
            named,
            [
                [name, self.code(item, path, member=True) if member else self.text(item, f"{path}({name})")]
                for name, item in cells
            ],
        ]

    def _class_named(self, kind: type, path: str) -> str:
        if in_library(kind.__module__) or trusted_name(kind.__module__, self._trusted):
            return _name(kind)
        return self._unknown(f"{path} is the class {_name(kind)}")

    def kind(self, kind: type, path: str) -> str:
        """A class that computes, by its name; its code along all bases is in `classes`."""
        for base in kind.__mro__[:-1]:
            if base not in self._classes:
                self._classes[base] = _name(base)  # a class may hold itself
                self._classes[base] = self._own(base, path)
        return _name(kind)

    def _own(self, kind: type, path: str) -> Any:
        trusted = trusted_name(kind.__module__, self._trusted)
        if not trusted and not in_library(kind.__module__):
            return self._unknown(f"{path or 'the model'} is a {_name(kind)}, which is no library's class")
        if home(kind.__module__) not in KNOWN and not trusted:
            return _name(kind)  # Python's own
        left_out = _MADE_BY if kind is nn.Module else frozenset[str]()
        self.watch(vars(kind), left_out.__contains__ if left_out else None)
        own = {name: value for name, value in vars(kind).items() if name not in left_out}
        held = [[name, self._member(value, f"{_name(kind)}.{name}", trusted)] for name, value in own.items()]
        bases = [_name(base) for base in kind.__mro__]
        return [bases, sorted((item for item in held if item[1]), key=lambda item: item[0])]

    def _member(self, value: Any, path: str, trusted: bool) -> Any:
        """What stands in a class: its code, and for a trusted class its values too."""
        if isinstance(value, staticmethod | classmethod):
            return self._member(value.__func__, path, trusted)
        if isinstance(value, property):
            return [self._member(part, path, trusted) for part in (value.fget, value.fset) if part is not None]
        if isinstance(value, functools.cached_property):
            return self._member(value.func, path, trusted)
        if isinstance(value, _CODE):
            return self.code(value, path, member=not trusted)
        if trusted and counts(path.rpartition(".")[2]) and not path.endswith("__"):
            return self.text(value, path)
        if callable(value) and not isinstance(value, type) and not in_library(type(value).__module__):
            return self._unknown(f"{path} is a {_name(type(value))}")
        return ""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, by name; what is not set yet is left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def counts(name: Any) -> bool:
    """Whether an attribute of this name decides what a model computes."""
    return name not in IGNORED


class _Watched:
    """A dictionary or a list, and the items that it had."""

    def __init__(self, held: Any, without: Callable[[str], bool] | None) -> None:
        self.held, self.without = held, without
        self.views = (held.keys(), held.values()) if isinstance(held, Mapping) else (held,)
        self.was = [list(view) for view in self.views]

    def same(self) -> bool:
        """Whether the items that count are what they were: plain values by type and value, all others by identity."""
        if len(self.views) == 1:
            return len(self.held) == len(self.was[0]) and all(map(_same, self.held, self.was[0]))
        was = {name: value for name, value in zip(*self.was, strict=True) if self._counts(name)}
        now = {name: value for name, value in self.held.items() if self._counts(name)}
        return was.keys() == now.keys() and all(_same(now[name], value) for name, value in was.items())

    def _counts(self, name: Any) -> bool:
        return counts(name) and (self.without is None or not self.without(name))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and plain(one) and one == other)


class Watcher:
    """Tells whether everything that was described is what it was: one pass over the identities of all items."""

    def __init__(self, watched: list[_Watched], copied: list[tuple[Any, Any]]) -> None:
        self._copied = copied
        self._restless = [one for one in watched if one.without is not None]
        self._quiet = [one for one in watched if one.without is None]
        self._flatten()

    def _flatten(self) -> None:
        self._views = [view for one in self._quiet for view in one.views]
        self._flat = [item for one in self._quiet for was in one.was for item in was]

    def unchanged(self) -> bool:
        if any(now != was for now, was in self._copied) or not all(one.same() for one in self._restless):
            return False
        now = chain.from_iterable(self._views)
        if sum(map(len, self._views)) == len(self._flat) and all(map(is_, now, self._flat)):
            return True
        if not all(one.same() for one in self._quiet):
            return False
        self._quiet = [_Watched(one.held, None) for one in self._quiet]  # values that are equal, or do not count
        self._flatten()
        return True
