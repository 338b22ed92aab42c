"""Errors of DejaKV. Each message names cause and remedy."""

import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires


class DejaKVError(Exception):
    """Base of all errors of this package."""


class ConfigError(DejaKVError, ValueError):
    """A setting is wrong or does not fit another one."""


class InputError(DejaKVError, ValueError):
    """A request cannot be served as it is (empty question, unreadable image, prompt over the context)."""


class ModelError(DejaKVError):
    """A model is unknown, incomplete, damaged or unsupported by the method."""


class ModelChangedError(DejaKVError):
    """The model changed after the lookup. Nothing was computed: look up again and repeat the call."""


class DatasetError(DejaKVError):
    """A data set is unknown, missing files, or a record lacks a field."""


class StoreError(DejaKVError):
    """A store cannot be opened or written. Reading never raises it: unreadable data is a counted miss."""


class OutputError(DejaKVError):
    """A command cannot continue to write its files. Written files are kept."""


class MissingExtraError(DejaKVError, ImportError):
    """An optional dependency is missing. The message has the command to install it."""

    def __init__(self, package: str, extra: str, purpose: str, note: str = "") -> None:
        needed = " ".join(f"'{name}'" for name in requirements_of(extra)) or f"'{package}'"
        super().__init__(
            f"{purpose} needs the package '{package}' (extra {extra}): python -m pip install {needed}{note}"
        )


def requirements_of(extra: str) -> list[str]:
    """Requirements of an extra of this package, for pip; empty for an unknown one. `pip install 'dejakv[extra]'` need not work, since the
    package itself may come from a folder.
    """
    try:
        listed = requires("dejakv") or []
    except PackageNotFoundError:
        return []
    parts = [line.partition(";") for line in listed]
    return [name.strip() for name, _, mark in parts if mark.replace('"', "'").strip() == f"extra == '{extra}'"]


def command(arguments: str) -> str:
    """Return a `dejakv` command line to paste into a shell; `PYTHON -m dejakv ...` if no script is on the PATH."""
    if shutil.which("dejakv"):
        return f"dejakv {arguments}"
    return f"{shlex.quote(sys.executable or 'python')} -m dejakv {arguments}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a device or on the host, by PyTorch's or the system's message."""
    # By words too: devices and allocators raise plain RuntimeErrors.
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape what would control a terminal or turn the direction of writing (C0, C1, bidi controls); line ends and tabs stay.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)
