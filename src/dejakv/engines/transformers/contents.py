"""Description of a model by content, its weights apart, and a check that nothing of it changed.

A function is its code object, defaults, closure and what its code names on module level; a class is
its members; a value its content. Nothing counts for what it says of itself: no name, no module, no
file. Native code and what C objects hold are not read.
"""

import dis
import enum
import functools
import hashlib
import inspect
import json
import pathlib
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dejakv.identity import digest_of

IGNORED = frozenset(vars(nn.Module())) - {"training"} | {
    # where a model was loaded from, and bookkeeping of Python, transformers and accelerate
    "name_or_path", "_name_or_path", "_model_name_or_path", "base_model_name_or_path",
    "transformers_version", "_commit_hash", "architectures", "generation_config", "loss_type",
    "all_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules",
    "_skip_keys_device_placement", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_weight_conversions",
    "_is_hf_initialized", "_can_set_attn_implementation_cached_value",
    "_can_set_experts_implementation_cached_value", "_output_capturing_hooks_installed", "generate",
    "__getstate__", "_abc_impl", "__annotations__", "__dict__", "__doc__", "__firstlineno__",
    "__module__", "__qualname__", "__static_attributes__", "__weakref__", "__orig_bases__",
    "__parameters__", "__dataclass_fields__", "__validators__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "_auto_class", "__slotnames__",
}  # fmt: skip
"""Attributes without effect on the computation, or described in another way."""
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, range, slice, type(Ellipsis), type(NotImplemented),
    pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath,
)  # fmt: skip
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
_NOTHING = object()

Leave = Callable[[str], bool]


def is_plain_value(value: Any) -> bool:
    """Tell whether a value is nothing but itself.

    Such a value never changes, and its `repr` is the same in every process.
    """
    return type(value) in _VALUES or (isinstance(value, np.generic) and _native(type(value)))


def _native(kind: type) -> bool:
    # The flag of types that a class statement made (Py_TPFLAGS_HEAPTYPE).
    return not kind.__flags__ & 1 << 9


class _Code:
    """A code object, read once in a process: it never changes.

    Attributes
    ----------
    digest : str
        SHA-256 of the code, equal in every process. Names of files, functions and lines do not
        count.
    """

    def __init__(self, code: types.CodeType) -> None:
        # Compared with the object itself: the id of a freed one may come again.
        self.of = weakref.ref(code)
        self.inner = [item for item in code.co_consts if isinstance(item, types.CodeType)]
        content = (
            code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
            code.co_exceptiontable, [_constant(item) for item in code.co_consts],
        )  # fmt: skip
        self.digest = hashlib.sha256(repr(content).encode()).hexdigest()

    @functools.cached_property
    def looks_up(self) -> tuple[list[tuple[str, ...]], frozenset[str]]:
        """Chains of names on module level, and names that are looked up on anything else.

        `a.b.c` is the chain `("a", "b", "c")`. Names of inner code are included.
        """
        chains, attributes, current_chain = set[tuple[str, ...]](), set[str](), list[str]()
        code = self.of()
        for step in dis.get_instructions(code) if code is not None else ():
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                chains.add(tuple(current_chain))
                current_chain = [step.argval]
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                if current_chain:
                    current_chain.append(step.argval)
                else:
                    # An attribute of anything: only a run could tell of what.
                    attributes.add(step.argval)
            elif step.opname != "PUSH_NULL":
                chains.add(tuple(current_chain))
                current_chain = []

        for item in self.inner:
            nested = read_code(item).looks_up
            chains.update(nested[0])
            attributes |= nested[1]

        return sorted(chains - {()}), frozenset(attributes)


_codes: dict[int, _Code] = {}


def read_code(code: types.CodeType) -> _Code:
    """Read a code object and those inside it."""
    cached_code = _codes.get(id(code))
    if cached_code is None or cached_code.of() is not code:
        cached_code = _codes[id(code)] = _Code(code)
    return cached_code


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return read_code(value).digest
    # A set has another order in every process.
    if isinstance(value, frozenset):
        return "set", sorted(map(repr, value))
    return (
        [_constant(item) for item in value]
        if isinstance(value, tuple)
        else (type(value).__name__, repr(value))
    )


def codes_of(namespace: dict[str, Any]) -> frozenset[int]:
    """Return the `id()` of each code object of a module's functions and methods, nested ones too.

    Functions that the module imports are left out.
    """
    members = [
        item
        for kind in namespace.values()
        if isinstance(kind, type)
        for item in vars(kind).values()
    ]
    functions = [
        function for item in (*namespace.values(), *members) for function in _functions_of(item)
    ]
    functions += [
        item
        for function in functions
        if (item := getattr(function, "__wrapped__", None)) is not None
    ]
    # Functions that the module imported belong to another one.
    waiting = [
        item.__code__ for item in functions if getattr(item, "__globals__", None) is namespace
    ]

    met = dict[int, types.CodeType]()
    while waiting:
        code = waiting.pop()
        if id(code) not in met:
            met[id(code)] = code
            waiting += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(met)


class Contents:
    """A model as it was when this was made.

    Attributes
    ----------
    digest : str
        Fingerprint of all that is not a weight: classes and their code, values on modules (a norm's
        epsilon, an adapter's scaling), configurations, shared parameters, the processor's settings;
        equal in every process.
    names : list[str]
        Names of `tensors`.
    foreign : str
        The first thing that cannot be described; empty if all can.
    """

    def __init__(self, model: nn.Module, processor: Any = None) -> None:
        self.foreign, self.names = "", list[str]()
        self._parts = {id(module) for module in model.modules()}
        self._modules: list[nn.Module] = []
        self._registers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self._loose: dict[str, Tensor] = {}
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

        self._look = _Look()
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
            self._look.watch_name(table, "sdpa")
            text.append(
                self._description(
                    table.get("sdpa"), "the attention function sdpa", runs_with_model=True
                )
            )
        self._follow()

        self.digest = digest_of(json.dumps([text, self._texts]))
        self.names += self._loose
        self._kinds = [type(module) for module in self._modules]
        self._look.finish_reading()

    def tensors(self) -> list[Tensor | None]:
        """Return parameters, buffers (persistent or not) and tensors that are plain attributes.

        They are as the modules hold them now; None for empty slots. A parameter that modules share
        comes more than once.
        """
        registered = (
            vars(module)[kind].values() for module, kinds in self._registers for kind in kinds
        )
        return [*chain.from_iterable(registered), *self._loose.values()]

    def unchanged(self) -> bool:
        """Tell whether the model is still what it was, weights aside.

        The check is fast enough for every request.
        """
        return all(map(is_, map(type, self._modules), self._kinds)) and self._look.same()

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
            return self._class(value, path, self._hops + 1)
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
                    f"{path} is a method of {_name(type(value.__self__))}, which is no part of the "
                    "model"
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
            self._loose[path] = value
            return ["tensor", self._tensor(value, path)]
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.writeable:
            # A tensor on the same memory: a write into the array is noticed.
            self._loose[path] = torch.from_numpy(value)
            return "array"
        if isinstance(value, enum.Enum):
            return [self._class(type(value), path), value.name]
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
                f"{path or 'the model'} holds a {_name(kind)}, whose content cannot be read"
            )
        if isinstance(value, set | frozenset):
            self._look.watch_set(value)
            read.append(sorted(str(self._description(item, path)) for item in value))
        elif isinstance(value, list | tuple):
            self._look.watch_items(value)
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
        return [self._class(kind, path), default_factory, read]

    def _items(self, value: Mapping[Any, Any], path: str, leave: Leave | None = None) -> list[Any]:
        self._look.watch_items(value, leave)
        named = {str(name): item for name, item in value.items() if _counts(name, leave)}
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
        self._modules.append(module)
        leave = left_by_runs(module)
        # a length's tables are in its prompts' epochs
        kinds = ("_parameters",) if changes_with_length(module) else ("_parameters", "_buffers")
        self._registers.append((module, kinds))

        carried: list[Any] = []
        for name, tensor in chain.from_iterable(vars(module)[kind].items() for kind in kinds):
            self.names.append(f"{path}.{name}")
            if tensor is not None and id(tensor) not in self._seen:
                self._note(tensor)
                carried.append([name, self._tensor(tensor, f"{path}.{name}")])
            elif tensor is not None:
                # Which modules share a tensor (tied weights) is a part of the model.
                carried.append([name, self._seen[id(tensor)][0]])

        parts = module._modules
        self._look.watch_items(parts)
        return [
            self._class(type(module), path),
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
        extra_attributes = {name: item for name, item in vars(value).items() if _counts(name)}
        if type(value) in (Tensor, nn.Parameter, nn.Buffer) and not extra_attributes:
            return ""
        return [self._class(type(value), path), self._items(vars(value), path)]

    def _hooks(self, tables: Iterable[Any], where: str) -> list[Any]:
        texts: list[Any] = []
        for table in tables:
            self._look.watch_hooks(table)
            hooks = _foreign_hooks(table)
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
        self._look.watch_items(vars(processor))
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

    def _class(self, kind: type, path: str, hops: int | None = None) -> Any:
        """Describe members along all bases, and those of the metaclass.

        Parameters
        ----------
        hops : int or None
            How many classes away; None for the distance of the thing that is read.
        """
        hops = self._hops if hops is None else hops
        for base in (*inspect.getmro(type(kind)), *kind.__mro__):
            # A class that comes nearer than before is read again: more of its code counts now.
            if _native(base) or hops > _HOPS or self._classes.get(base, (0, hops + 1))[1] <= hops:
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
                self._classes[base][0] if base in self._classes else _name(base)
                for base in kind.__mro__
            ),
        ]

    def _members(self, kind: type) -> Any:
        leave = _MAKE_MODULES.__contains__ if kind is nn.Module else None
        self._look.watch_items(vars(kind), leave)
        named = {name: item for name, item in vars(kind).items() if _counts(name, leave)}
        return [[name, self._level(named[name], f"{_name(kind)}.{name}")] for name in sorted(named)]

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
            self._look.watch_function(value)
            self._texts[place] = self._of_function(
                value, path, self._description if strict else self._level
            )
        if runs_with_model and self._hops < self._followed.get(value, _HOPS):
            self._waiting.append((value, self._hops))
        return ["function", place]

    def _of_function(self, value: types.FunctionType, path: str, read: Callable[..., Any]) -> Any:
        # A function of torch.compile is what it compiles, and how.
        if id(value.__code__) in _compilers():
            inner = [cell for name, cell in _cells(value) if name in ("fn", "callback")]
            return [
                "compiled",
                [self._description(_innermost(cell), path, runs_with_model=True) for cell in inner],
            ]
        return [
            read_code(value.__code__).digest,
            [read(part, path) for part in (value.__defaults__, value.__kwdefaults__)],
            [[name, read(cell, f"{path}({name})")] for name, cell in _cells(value)],
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
                for name, cell in _cells(function):
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
                    for function in _functions_of(vars(kind)[name]):
                        self._function(function, name, runs_with_model=True)
            if not self._waiting:
                return

    def _named(self, names: dict[str, Any], chained: tuple[str, ...]) -> Any:
        """Describe what a chain of names stands for: `F.silu`, `settings.scale`."""
        holder: Any = names
        value: Any = _NOTHING
        for name in chained:
            value = _NOTHING
            for table in holder if isinstance(holder, tuple) else (holder,):
                # Noted even where it is missing: one that appears later would come before the next.
                value = self._look.watch_name(table, name)
                if value is not _NOTHING:
                    break

            # Where the next name is looked up: as Python does it, without running code.
            if isinstance(value, types.ModuleType):
                holder = vars(value)
            elif isinstance(value, type):
                holder = tuple(vars(base) for base in value.__mro__ if not _native(base))
            elif hasattr(type(value), "__dict__") and not _native(type(value)):
                kinds = tuple(vars(base) for base in type(value).__mro__ if not _native(base))
                holder = (*([vars(value)] if hasattr(value, "__dict__") else []), *kinds)
            else:
                break

        if value is _NOTHING:
            return ""
        return self._level(value, ".".join(chained), runs_with_model=True)

    def _level(self, value: Any, path: str, *, runs_with_model: bool = False) -> Any:
        """Describe a thing on module level, in a class or in its closures.

        What is no value there (loggers, registries, caches) is its class alone.
        """
        if isinstance(value, types.FunctionType):
            return self._function(value, path, runs_with_model=runs_with_model)
        if isinstance(value, type):
            return self._class(value, path, self._hops + 1)
        if functions := _functions_of(value):
            return [
                _name(type(value)),
                [
                    self._function(function, path, runs_with_model=runs_with_model)
                    for function in functions
                ],
            ]
        if isinstance(value, nn.Module | Tensor) or _simple(value):
            return self._description(value, path, runs_with_model=runs_with_model)
        return _name(type(value))


def _readable(value: Any) -> bool:
    """Tell whether an object's content is items and attributes.

    It is not where there are slots, or where native code holds it.
    """
    kinds = type(value).__mro__
    return (
        next(filter(_native, kinds)) in _CONTAINERS
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
        not _native(type(value))
        and depth > 0
        and _readable(value)
        and _simple(getattr(value, "__dict__", {}), depth - 1)
    )


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions behind a class's member."""
    if type(value) is types.FunctionType:
        return [value]
    if type(value) is property:
        return [
            item for part in (value.fget, value.fset, value.fdel) for item in _functions_of(part)
        ]
    if type(value) in (staticmethod, classmethod, types.MethodType):
        return _functions_of(value.__func__)
    if isinstance(value, functools._lru_cache_wrapper):
        return _functions_of(value.__wrapped__)
    return (
        _functions_of(value.func)
        if isinstance(value, functools.partial | functools.cached_property)
        else []
    )


@functools.cache
def _own_hooks() -> frozenset[int]:
    """Return the code of DejaKV's hooks and of a picture's ready features.

    They come and go and change nothing.
    """
    from dejakv.blend import prune
    from dejakv.engines.transformers import blend_model, hidden_keys, vision

    modules = (prune, blend_model, hidden_keys, vision)
    return frozenset(chain.from_iterable(codes_of(vars(module)) for module in modules))


def _compilers() -> frozenset[int]:
    """Return the code of `torch.compile`'s own functions."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return _codes_of_compiler() if compiler is not None else frozenset()


@functools.cache
def _codes_of_compiler() -> frozenset[int]:
    return codes_of(vars(sys.modules["torch._dynamo.eval_frame"]))


def _is_ours(value: Any) -> bool:
    return type(value) is types.FunctionType and id(value.__code__) in _own_hooks()


def _foreign_hooks(hooks: Mapping[Any, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if not _is_ours(hook)]


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's closure, by name; a cell that is not set yet is left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _counts(name: Any, leave: Leave | None = None) -> bool:
    """Tell whether an attribute of this name decides what a model computes."""
    return name not in IGNORED and not (leave is not None and leave(name))


def _same(current: Any, former: Any) -> bool:
    return current is former or (
        type(current) is type(former) and is_plain_value(current) and current == former
    )


class _Items:
    """A dictionary or a list, with its former items."""

    def __init__(self, container: Any, leave: Leave | None = None) -> None:
        self.container, self.leave = container, leave
        self.views = (
            (container,)
            if isinstance(container, list | tuple)
            else (container.keys(), container.values())
        )
        self.former_views = [list(view) for view in self.views]

    def same(self) -> bool:
        """Tell whether all counted items are unchanged.

        Plain values are compared by type and value, all others by identity.
        """
        if len(self.views) == 1:
            return len(self.container) == len(self.former_views[0]) and all(
                map(_same, self.container, self.former_views[0])
            )
        former_items = self._counted(zip(*self.former_views, strict=True))
        now = self._counted(self.container.items())
        return former_items.keys() == now.keys() and all(
            _same(now[name], value) for name, value in former_items.items()
        )

    def _counted(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Leave out what counts for nothing, and what DejaKV puts there for a run."""
        return {
            name: value
            for name, value in items
            if _counts(name, self.leave) and not _is_ours(value)
        }


class _Hooks(_Items):
    """Hooks, without those of DejaKV."""

    def __init__(self, container: Any) -> None:
        super().__init__(container)
        self.hooks = _foreign_hooks(container)

    def same(self) -> bool:
        """Tell whether the same hooks are there in the same order."""
        hooks = _foreign_hooks(self.container)
        return len(hooks) == len(self.hooks) and all(map(is_, hooks, self.hooks))


_OF_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class _Look:
    """All that was read, and whether it is what it was, in passes over identities."""

    def __init__(self) -> None:
        self._items: dict[int, _Items] = {}
        self._names: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._sets: list[tuple[Any, Any]] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[tuple[types.CellType, Any]] = []

    def watch_items(self, container: Any, leave: Leave | None = None) -> None:
        """Watch the items of a dictionary or a list, but for those to leave out."""
        self._items[id(container)] = _Items(container, leave)

    def watch_hooks(self, container: Any) -> None:
        """Watch a dictionary of hooks."""
        self._items[id(container)] = _Hooks(container)

    def watch_name(self, table: Any, name: str) -> Any:
        """Watch what a dictionary has under a name, and return it."""
        value = table.get(name, _NOTHING)
        self._names.setdefault((id(table), name), (table, name, value))
        return value

    def watch_set(self, container: Any) -> None:
        """Watch the members of a set."""
        self._sets.append((container, set(container)))

    def watch_function(self, function: types.FunctionType) -> None:
        """Watch a function's code, defaults and closure."""
        self._functions.append(function)
        self._cells += [
            (cell, value)
            for cell in function.__closure__ or ()
            if (value := _content(cell)) is not None
        ]

    def finish_reading(self) -> None:
        """Prepare the comparison, once everything was read."""
        # The first two are of the model itself, where runs of DejaKV come and go.
        hooks = [watched for watched in self._items.values() if isinstance(watched, _Hooks)][:2]
        # Compared one by one each time: their changes may mean nothing.
        self._restless = [
            watched for watched in self._items.values() if watched.leave is not None
        ] + hooks
        self._quiet = [
            watched
            for watched in self._items.values()
            if watched.leave is None and watched not in hooks
        ]
        self._code = [part for function in self._functions for part in _OF_CODE(function)]
        self._flatten()

    def _flatten(self) -> None:
        self._views = [view for watched in self._quiet for view in watched.views]
        self._flat = [
            item for watched in self._quiet for was in watched.former_views for item in was
        ]
        self._gets = [(table.get, name) for table, name, _ in self._names.values()]
        self._former_values = [was for _, _, was in self._names.values()]

    def same(self) -> bool:
        """Tell whether everything that was read is what it was."""
        code = chain.from_iterable(map(_OF_CODE, self._functions))
        if not (
            all(map(is_, code, self._code))
            and all(_content(cell) is was for cell, was in self._cells)
            and all(now == was for now, was in self._sets)
            and all(watched.same() for watched in self._restless)
        ):
            return False
        # Identities first, without Python code for each item; values only where these differ.
        items = chain.from_iterable(self._views)
        same = sum(map(len, self._views)) == len(self._flat) and all(map(is_, items, self._flat))
        if same and all(
            map(is_, [get(name, _NOTHING) for get, name in self._gets], self._former_values)
        ):
            return True

        names = {
            key: (table, name, table.get(name, _NOTHING))
            for key, (table, name, _) in self._names.items()
        }
        if not all(map(_same, [now for *_, now in names.values()], self._former_values)):
            return False
        if not all(watched.same() for watched in self._quiet):
            return False

        # Values that are equal, or do not count.
        self._names = names
        # With the new objects, or every later look would take the slow way.
        self._quiet = [type(watched)(watched.container) for watched in self._quiet]
        self._flatten()
        return True


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


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
