"""Code that was put into a model from outside: forward hooks and replaced methods.

What such code does cannot be read off it (a steering vector lives in a closure), and it may want to see every row. So a
model that carries some is computed in full. Code of the libraries that make up a model is known to leave its state alone.
"""

import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

KNOWN = frozenset({"accelerate", "bitsandbytes", "dejakv", "peft", "torch", "transformers"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Every forward hook and forward pre-hook of these modules and of the process."""
    found = [hook for module in modules for name in _HOOKS for hook in module.__dict__[name].values()]
    everywhere = nn.modules.module
    return [*found, *everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()]


def home(code: Any) -> str:
    """The top-level package that a function, method, partial or callable object comes from."""
    while hasattr(code, "func"):  # functools.partial copies the names of what it stands for
        code = code.func
    module = getattr(code, "__module__", None) or type(code).__module__
    return str(module).partition(".")[0]


def foreign_code(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """What is foreign in a model, as a reason to compute; empty if nothing is."""
    listed = list(modules)
    for name, module in listed:
        kind = type(module)
        known = KNOWN | {home(kind)}
        if home(kind.forward) not in known:
            return f"the forward of {kind.__name__} was replaced"
        for key, value in vars(module).items():
            if isinstance(value, _FUNCTIONS) and home(value) not in known:
                return f"{key} of {name or 'the model'} was replaced"
    for hook in hooks_of(module for _, module in listed):
        if home(hook) not in KNOWN:
            return f"a forward hook of {getattr(hook, '__module__', None) or type(hook).__module__} is registered"
    return ""
