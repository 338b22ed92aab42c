"""One check for every class of settings: a field holds what its annotation says, or an error names field, value and remedy.

    @dataclass(frozen=True)
    class MySettings:
        share: Share = 0.15
        folder: Folder | None = None

        def __post_init__(self) -> None:
            check_fields(self)

A bool is no number, a number is finite and fits 64 bits, text is valid Unicode without NUL.
"""

import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dejakv.errors import ConfigError, DejaKVError

T = TypeVar("T")
_LARGEST = 2**63 - 1
"""What SQLite and a C size hold."""
_REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")


@dataclass(frozen=True)
class Within:
    """The range of a number, both ends included; `above` leaves the lower end out."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def problem(self, value: float) -> str | None:
        if value > self.low or (value == self.low and not self.above):
            return None if value <= self.high else f"is too large: give {self}"
        return f"is negative: give {self}" if self.low == 0 and value < 0 else f"is too small: give {self}"

    def __str__(self) -> str:
        low = f"{'more than ' if self.above else ''}{self.low:g}"
        if self.high == math.inf:
            return low if self.above else f"{low} or more"
        return (
            f"a number above {self.low:g}, up to {self.high:g}"
            if self.above
            else f"a number from {low} to {self.high:g}"
        )


@dataclass(frozen=True)
class OnDisk:
    """A path that may or may not exist yet. `folder`: what exists must be a folder."""

    folder: bool = False

    def problem(self, value: str) -> str | None:
        if self.folder:
            refuse_redis(value)
        if not value:
            return "is empty: give a path, or leave the setting out"
        try:
            mode = os.stat(os.path.expanduser(value)).st_mode
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot be used ({error.strerror}): give another path"
        if self.folder and not stat.S_ISDIR(mode):
            return "is a file: give a folder"
        return None


def refuse_redis(place: str) -> None:
    """Raises: ConfigError for the address of a Redis server; the message leaves out the address, which may hold a password."""
    scheme = place.partition("://")[0]
    if "://" in place and scheme.lower() in _REDIS:
        raise ConfigError(
            f"{scheme}://... is a Redis address, and Redis is no longer a store: give a folder on a disk of this machine"
        )


Count = Annotated[int, Within(0)]
"""A number of things or bytes."""
Positive = Annotated[int, Within(1)]
Share = Annotated[float, Within(0, 1)]
Cosine = Annotated[float, Within(-1, 1)]
Seconds = Annotated[float, Within(0)]
Folder = Annotated[str, OnDisk(folder=True)]
AnyPath = Annotated[str, OnDisk()]


def check_fields(
    settings: object, *, flags: bool = False, error: type[DejaKVError] = ConfigError, nul: bool = False
) -> None:
    """Checks every field of a dataclass against its annotation.

    flags  errors name fields as the command line does (`--max-samples`)
    error  what is raised
    nul    texts may contain NUL: they are no settings but somebody's words

    Raises: `error`, naming the first field that is wrong, its value and what to give instead.
    """
    for name, kind in _kinds(type(settings)).items():
        value = getattr(settings, name)
        problem = _problem(value, kind, nul)
        if problem is not None:
            label = "--" + name.replace("_", "-") if flags else name
            raise error(f"{label}={shown(value)} {problem}")


def from_mapping(kind: Callable[..., T], values: object, where: str = "the settings") -> T:
    """An object of settings from plain values (JSON, flags). Lists become tuples.

    Raises: ConfigError for what is no mapping, and for an unknown name, listing the known.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {shown(values)} is no object: give names and values")
    given = cast(Mapping[Any, Any], values)
    known = {item.name for item in fields(cast(Any, kind))}
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {shown(name)}: known are {', '.join(sorted(known))}")
    plain = {name: tuple(cast(list[Any], value)) if isinstance(value, list) else value for name, value in given.items()}
    return kind(**plain)


def shown(value: object) -> str:
    """A value in an error message: short, whatever it is."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | NoneType):
        return repr(value)
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... ({len(value)} long)"
    if isinstance(value, list | tuple):
        items = cast(list[object], value)
        inner = ", ".join(shown(item) for item in items[:4]) + (", ..." if len(items) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return f"a {type(value).__name__}"


@cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cast(Any, cls))}


def _problem(value: object, kind: Any, nul: bool) -> str | None:
    """What is wrong with a value of this annotation, and the remedy."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _problem(value, arguments[0], nul) or arguments[1].problem(value)
    if origin in (Union, UnionType):
        return _union_problem(value, arguments, nul)
    if origin is Literal:
        known = ", ".join(map(str, arguments))
        return None if isinstance(value, str) and value in arguments else f"is unknown: choose one of {known}"
    if origin is tuple:
        return _tuple_problem(value, arguments[0], nul)
    if kind is str:
        return _text_problem(value, nul)
    if kind in (int, float):
        return _number_problem(value, kind)
    if kind is bool:
        return None if isinstance(value, bool) else "is neither true nor false: give one of them"
    if kind is Any or isinstance(value, origin or kind):
        return None
    return f"is of the wrong type: give a {(origin or kind).__name__}"


def _union_problem(value: object, kinds: tuple[Any, ...], nul: bool) -> str | None:
    if value is None and NoneType in kinds:
        return None
    problems = [_problem(value, kind, nul) for kind in kinds if kind is not NoneType]
    return None if None in problems else problems[0]


def _tuple_problem(value: object, kind: Any, nul: bool) -> str | None:
    if not isinstance(value, tuple):
        return "is a list: give a tuple" if isinstance(value, list) else "is no list: give a list, of one if it is one"
    for item in cast(tuple[object, ...], value):
        problem = _problem(item, kind, nul)
        if problem is not None:
            return f"holds {shown(item)}, which {problem}"
    return None


def _text_problem(value: object, nul: bool) -> str | None:
    if not isinstance(value, str):
        return "is no text: give a string"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode (a lone surrogate): give text that UTF-8 can encode"
    return "contains a NUL: remove it" if "\0" in value and not nul else None


def _number_problem(value: object, kind: type) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return "is no whole number: give an integer" if kind is int else "is no number: give one"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite: give a finite number"
    return None if abs(value) <= _LARGEST else "is too large: give less than 2^63"
