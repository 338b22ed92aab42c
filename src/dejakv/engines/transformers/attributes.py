"""Values that hang on modules, as text that is the same in every process, and as copies to compare with later."""

import copy
import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
IGNORED = frozenset(vars(nn.Module())) - {"training"} | {
    # where a model was loaded from, and bookkeeping of transformers and accelerate
    "name_or_path", "_name_or_path", "_model_name_or_path", "base_model_name_or_path", "transformers_version", "_commit_hash",
    "architectures", "generation_config", "loss_type", "all_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules", "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_weight_conversions",
    "_is_hf_initialized", "_output_capturing_hooks_installed", "_old_forward", "generate", "get_image_features",
}  # fmt: skip
_NAMED = (nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_DEPTH = 8


class Described:
    """Describes values, and remembers the tensors and objects met on the way.

    tensors  by path: tensors kept as plain attributes, which `named_buffers` does not list
    objects  attributes of each (a configuration, an adapter's settings), how many there were, and the simple ones among them
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: list[tuple[Mapping[str, Any], int, dict[str, Any]]] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def text(self, value: Any, path: str, depth: int = _DEPTH) -> Any:
        """JSON-able; equal values of two processes give equal text."""
        if isinstance(value, enum.Enum | type):
            return f"{value.__module__}.{value}"
        if isinstance(value, SCALARS):
            return repr(value)
        if isinstance(value, torch.Tensor):
            self.tensors[path] = value
            return "tensor"
        if not depth:
            return _name_of(value)
        if isinstance(value, Mapping):
            named = {str(name): item for name, item in value.items() if _counts(name)}
            return [[name, self.text(named[name], f"{path}.{name}", depth - 1)] for name in sorted(named)]
        if isinstance(value, list | tuple):
            return [self.text(item, f"{path}.{index}", depth - 1) for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return sorted(str(self.text(item, path, depth - 1)) for item in value)
        return self._object(value, path, depth)

    def _object(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.text([value.func, value.args, value.keywords], path, depth - 1)]
        if isinstance(value, _NAMED) or type(value).__module__.startswith("torch.") or not hasattr(value, "__dict__"):
            return _name_of(value)
        if id(value) in self._seen:
            return f"object {self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)  # or another object could get its id
        held = vars(value)
        self.objects.append((held, len(held), {key: kept(item) for key, item in held.items() if simple(item)}))
        return [_name_of(value), self.text(held, path, depth - 1)]


def _name_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def simple(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a copy of the value can be compared with it: scalars, and containers of nothing else."""
    if isinstance(value, SCALARS):
        return True
    if not depth or not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(simple(item, depth - 1) for item in items)


def kept(value: Any) -> Any:
    """A copy that later changes do not reach."""
    return value if isinstance(value, SCALARS) else copy.deepcopy(value)


def _counts(name: Any) -> bool:
    return name not in IGNORED and not str(name).startswith("_dejakv")


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters, buffers, children and hooks."""
    return {name: value for name, value in vars(module).items() if _counts(name)}
