"""Whose code a function or a class is: a known library's, trusted by the model's owner, or neither.

`__module__` and names tell nothing of a function, since `functools.wraps` copies both. A function is a library's if it was compiled
from a file of that library and reads the names of that library's module.
"""

import functools
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

KNOWN = frozenset({
    "accelerate", "bitsandbytes", "dejakv", "einops", "gguf", "huggingface_hub", "numpy", "peft", "safetensors",
    "sentence_transformers", "timm", "tokenizers", "torch", "torchao", "torchvision", "transformers", "typing_extensions",
})  # fmt: skip
"""Libraries whose releases stand for their code."""
REMOTE = "transformers_modules"
"""transformers' package of models' own code (`trust_remote_code`), which its user thereby declares trusted."""


def home(name: str) -> str:
    """The top-level package of a module's name."""
    return name.partition(".")[0]


def in_library(name: str) -> bool:
    """Whether a module of this name belongs to a known library or to Python itself."""
    return home(name) in KNOWN or home(name) in sys.stdlib_module_names


def of_library(code: types.FunctionType) -> bool:
    """Whether a function is compiled from a file of a library."""
    name = str(code.__globals__.get("__name__", ""))
    module = sys.modules.get(name)
    if module is None or vars(module) is not code.__globals__ or not in_library(name):
        return False
    return home(name) not in KNOWN or code.__code__.co_filename.startswith(("<", _folder(home(name))))


def installed(code: types.FunctionType) -> bool:
    """Whether a function is a library's or comes from a package that is installed beside them."""
    return of_library(code) or code.__code__.co_filename.startswith(str(Path(_folder("transformers")).parent))


@functools.cache
def _folder(package: str) -> str:
    return str(Path(str(sys.modules[package].__file__)).parent)


def is_trusted(name: str, trusted: frozenset[str]) -> bool:
    """Whether a module of this name is trusted, or is inside a package that is."""
    return home(name) == REMOTE or any(name == given or name.startswith(f"{given}.") for given in trusted)


@functools.cache
def source_digest(name: str) -> str:
    """Over the source files beside a module's own; empty for a module without a file (a notebook's)."""
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
