"""DejaKV: reuse what a language model already computed for a similar prompt, and prove what that saved and cost.

Importing the package loads neither torch nor an engine; public names resolve on first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, str] = {}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dejakv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
