"""Watch over all that was read of a model: whether it is still what it was.

A look is passes over identities, fast enough for every request.
"""

import functools
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dejakv.engines.transformers.fingerprint.code_objects import codes_of, is_native

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
NOTHING = object()
"""What a table holds under a missing name."""

Leave = Callable[[str], bool]
"""Tells names of attributes that are left out."""


def is_plain_value(value: Any) -> bool:
    """Tell whether a value is nothing but itself.

    Such a value never changes, and its `repr` is the same in every process.
    """
    return type(value) in _VALUES or (isinstance(value, np.generic) and is_native(type(value)))


def counts(name: Any, leave: Leave | None = None) -> bool:
    """Tell whether an attribute of this name decides what a model computes."""
    return name not in IGNORED and not (leave is not None and leave(name))


def _same(current: Any, former: Any) -> bool:
    return current is former or (
        type(current) is type(former) and is_plain_value(current) and current == former
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


def _is_ours(value: Any) -> bool:
    return type(value) is types.FunctionType and id(value.__code__) in _own_hooks()


def foreign_hooks(hooks: Mapping[Any, Any]) -> list[Any]:
    """Return the hooks of a table that are not DejaKV's."""
    return [hook for hook in hooks.values() if not _is_ours(hook)]


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
            name: value for name, value in items if counts(name, self.leave) and not _is_ours(value)
        }


class _Hooks(_Items):
    """Hooks, without those of DejaKV."""

    def __init__(self, container: Any) -> None:
        super().__init__(container)
        self.hooks = foreign_hooks(container)

    def same(self) -> bool:
        """Tell whether the same hooks are there in the same order."""
        hooks = foreign_hooks(self.container)
        return len(hooks) == len(self.hooks) and all(map(is_, hooks, self.hooks))


_OF_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class ContentWatch:
    """All that was read, and whether it is what it was, in passes over identities.

    Attributes
    ----------
    names : list[str]
        Names of `tensors`.
    """

    def __init__(self) -> None:
        self.names = list[str]()
        self._modules: list[nn.Module] = []
        self._registers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self._loose: dict[str, Tensor] = {}
        self._items: dict[int, _Items] = {}
        self._names: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._sets: list[tuple[Any, Any]] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[tuple[types.CellType, Any]] = []

    def watch_module(self, module: nn.Module, kinds: tuple[str, ...]) -> None:
        """Watch a module's class and, by kind, what it registers; see `tensors`."""
        self._modules.append(module)
        self._registers.append((module, kinds))

    def watch_tensor(self, path: str, tensor: Tensor) -> None:
        """Watch a tensor that no module registers."""
        self._loose[path] = tensor

    def watch_items(self, container: Any, leave: Leave | None = None) -> None:
        """Watch the items of a dictionary or a list, but for those to leave out."""
        self._items[id(container)] = _Items(container, leave)

    def watch_hooks(self, container: Any) -> None:
        """Watch a dictionary of hooks."""
        self._items[id(container)] = _Hooks(container)

    def watch_name(self, table: Any, name: str) -> Any:
        """Watch what a dictionary has under a name, and return it."""
        value = table.get(name, NOTHING)
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
        self.names += self._loose
        self._kinds = [type(module) for module in self._modules]
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
        if not all(map(is_, map(type, self._modules), self._kinds)):
            return False
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
            map(is_, [get(name, NOTHING) for get, name in self._gets], self._former_values)
        ):
            return True

        names = {
            key: (table, name, table.get(name, NOTHING))
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
