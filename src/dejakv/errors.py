"""The errors of DejaKV, each with a message that names cause and remedy, and words for messages."""

import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any, TypeVar

T = TypeVar("T")


class DejaKVError(Exception):
    """Base of all errors of this package."""


class ConfigError(DejaKVError, ValueError):
    """A setting is wrong or does not fit another one."""


class InputError(DejaKVError, ValueError):
    """A request cannot be served as it is.

    Examples are an empty question, an unreadable image and a prompt that exceeds the context.
    """


class ModelError(DejaKVError):
    """A model is unknown, incomplete, damaged or unsupported by the method."""


class ModelChangedError(DejaKVError):
    """The model changed after the lookup and nothing was computed.

    Look up again and repeat the call.
    """


class DatasetError(DejaKVError):
    """A data set is unknown, missing files, or a record lacks a field."""


class StoreError(DejaKVError):
    """A store, or a bound's evidence, cannot be opened, read or written.

    Reading an entry of an open store gives a counted miss instead.
    """


class OutputError(DejaKVError):
    """A command cannot continue to write its files. Written files are kept."""


class MissingExtraError(DejaKVError, ImportError):
    """An optional dependency is missing. The message has the command to install it.

    Parameters
    ----------
    package : str
        The package that could not be imported.
    extra : str
        The extra of `dejakv` that installs it.
    purpose : str
        What needs the package; begins the message.
    note : str
        End of the message.
    """

    def __init__(self, package: str, extra: str, purpose: str, note: str = "") -> None:
        needed = " ".join(f"'{name}'" for name in requirements_of(extra)) or f"'{package}'"
        super().__init__(
            f"{purpose} needs the package '{package}' (extra {extra}): python -m pip install "
            f"{needed}{note}"
        )


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of an extra of this package, for pip; empty for an unknown extra.

    `pip install 'dejakv[extra]'` need not work, since the package itself may come from a folder.
    """
    try:
        listed = requires("dejakv") or []
    except PackageNotFoundError:
        return []

    parts = [line.partition(";") for line in listed]
    return [
        name.strip()
        for name, _, mark in parts
        if mark.replace('"', "'").strip() == f"extra == '{extra}'"
    ]


def command_line(arguments: str) -> str:
    """Return a `dejakv` command line to paste into a shell.

    It is `PYTHON -m dejakv ...` where no script is on the PATH.
    """
    if shutil.which("dejakv"):
        return f"dejakv {arguments}"
    return f"{shlex.quote(sys.executable or 'python')} -m dejakv {arguments}"


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an allocation failed, on a device or on the host, by the error's message."""
    # By words too: devices and allocators raise plain RuntimeErrors.
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun: `1 prompt`, `2,000 prompts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escape characters that control a terminal or turn the direction of writing.

    These are C0, C1 and bidi controls, carriage returns among them. Line feeds and tabs stay.

    Examples
    --------
    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


def former_names(module: str, **new_names: str) -> Callable[[str], object]:
    """Make the `__getattr__` of a module whose names changed.

    The former names work for one release, with a DeprecationWarning.

    Parameters
    ----------
    module : str
        The module's `__name__`.
    **new_names : str
        The name that took the place of each former one.
    """

    def get(name: str) -> object:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_former_name(f"{module}.{name}", new_names[name])
        # Not cached in the module: each use of a former name warns.
        return getattr(sys.modules[module], new_names[name])

    return get


def former_module(module: str, new_module: str) -> Callable[[str], object]:
    """Make the `__getattr__` of a module whose content has moved to another module.

    The former path works for one release, with a DeprecationWarning.

    Parameters
    ----------
    module : str
        The former module's `__name__`.
    new_module : str
        Name of the module that has its content now.
    """

    def get(name: str) -> object:
        # Python itself asks for dunder names, as of any module.
        if name.startswith("__") or not hasattr(target := import_module(new_module), name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module} is now {new_module}, and leaves with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(target, name)

    return get


class FormerAttribute:
    """Descriptor for an attribute's former name, which reads and sets the new one and warns.

    Parameters
    ----------
    new_name : str
        Name that the attribute has now.
    """

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self._former_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # Tools that list a class's members are no readers of the attribute.
        if instance is None:
            return self
        warn_of_former_name(self._former_name, self._new_name)
        return getattr(instance, self._new_name)

    def __set__(self, instance: object, value: Any) -> None:
        warn_of_former_name(self._former_name, self._new_name)
        setattr(instance, self._new_name, value)


def former_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass whose fields changed their names.

    The former names work for one release, as arguments and as attributes, with a
    DeprecationWarning.

    Parameters
    ----------
    **new_names : str
        The name that took the place of each former one.
    """

    def decorate(cls: type[T]) -> type[T]:
        dataclass: Any = cls
        original_init = dataclass.__init__

        @wraps(original_init)
        def init(self: object, *args: Any, **values: Any) -> None:
            for former_name in values.keys() & new_names.keys():
                new_name = new_names[former_name]
                warn_of_former_name(f"{cls.__name__}.{former_name}", new_name)
                values[new_name] = values.pop(former_name)
            original_init(self, *args, **values)

        dataclass.__init__ = init
        for former_name, new_name in new_names.items():
            descriptor = FormerAttribute(new_name)
            descriptor.__set_name__(cls, former_name)
            setattr(cls, former_name, descriptor)
        return cls

    return decorate


def move_former_attribute(cls: type, former_name: str, new_name: str) -> None:
    """Give a subclass's attribute its new name if the subclass defines it by the former one.

    Call it in `__init_subclass__` of a class that has a `FormerAttribute` of that name.
    """
    if former_name in vars(cls):
        warn_of_former_name(f"{cls.__name__}.{former_name}", new_name, stacklevel=4)
        setattr(cls, new_name, vars(cls)[former_name])
        # Reading the former name then comes to the base's descriptor.
        delattr(cls, former_name)


def warn_of_former_name(former_name: str, new_name: str, stacklevel: int = 3) -> None:
    """Warn that a name works for one release, and name what took its place."""
    warnings.warn(
        f"{former_name} is now named {new_name}, and leaves with the next release",
        DeprecationWarning,
        # Whoever wrote the former name: usually the caller of what calls this.
        stacklevel=stacklevel,
    )
