"""One check for every class of settings: a field holds what its annotation says, or an error names field, value and remedy.

    @dataclass(frozen=True)
    class MySettings:
        share: Share = 0.15
        folder: Folder | None = None

        def __post_init__(self) -> None:
            check_fields(self)

pydantic checks, strictly, and is imported at the first check. Beyond it: a number fits 64 bits, and text is valid Unicode without NUL.
"""

import inspect
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dejakv.errors import ConfigError, DejaKVError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_LARGEST = 2**63 - 1
"""What SQLite and a C size hold."""
MEMORY = "memory:"
_BUCKET = re.compile(r"(s3|gs|az)://[^/?#@:\s]+(/[^/?#\s]+)*/?")
_ADDRESS = re.compile(r"(?i)[a-z][\w+.-]+:/|(s3|gs|az|memory|file|rediss?|https?):|(s3|gs|az)//|.*://", re.DOTALL)
"""What is meant as an address, however it is mistyped: no folder is made for it."""
_NO_FOLDER = f"is an address: give a folder on a disk of this machine, or {MEMORY}"
_NO_PLACE = (
    f"is no address of a store: give a folder, {MEMORY}, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; credentials "
    "stand in the environment (docs/explanation/store.md)"
)
_SAYS = {
    "bool_type": "is neither true nor false: give one of them",
    "int_type": "is no whole number: give an integer",
    "float_type": "is no number: give one",
    "finite_number": "is not finite: give a finite number",
    "string_type": "is no text: give a string",
}
"""pydantic's kinds of errors, and what is said of them here."""


class _FieldKind:
    """What an annotation asks beyond its type."""

    def problem(self, value: Any) -> str | None:
        """The fault of a value of the right type, with its remedy; None if it fits."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            problem = self.problem(value)
            if problem is not None:
                raise PydanticCustomError("dejakv", "{problem}", {"problem": problem})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


@dataclass(frozen=True)
class NumberRange(_FieldKind):
    """The range of a number, both ends included; `above` excludes the lower end, `below` the upper one."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def problem(self, value: float) -> str | None:
        if value > self.low or (value == self.low and not self.above):
            fits = value < self.high or (value == self.high and not self.below)
            return None if fits else f"is too large: give {self}"
        return f"is negative: give {self}" if self.low == 0 and value < 0 else f"is too small: give {self}"

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        if self.above:
            return f"a number above {self.low:g} and {'below' if self.below else 'up to'} {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class OnDisk(_FieldKind):
    """A path that may or may not exist yet. `folder`: what exists must be a folder; `store`: it may be the address of a store."""

    folder: bool = False
    store: bool = False

    def problem(self, value: str) -> str | None:
        if self.store and (is_memory(value) or _BUCKET.fullmatch(value)):
            return None
        if self.folder and _ADDRESS.match(value):
            return _NO_PLACE if self.store else _NO_FOLDER
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


@dataclass(frozen=True)
class _InstanceOf(_FieldKind):
    """An object of a class."""

    kind: type

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, self.kind) else f"is of the wrong type: give a {self.kind.__name__}"


class _FeedAddress(_FieldKind):
    """An address of Redis or Valkey."""

    def problem(self, value: str) -> str | None:
        return (
            None
            if re.match(r"rediss?://[^/]", value)
            else "is no address of a feed: give redis://HOST:PORT/DB, or rediss://"
        )


def is_memory(place: str) -> bool:
    """Whether a store's address is this process's memory."""
    return place.removesuffix("//") == MEMORY


def in_bucket(place: str) -> bool:
    """Whether a store's address is in a bucket; otherwise it is memory or a folder. Raises: ConfigError for another address."""
    if is_memory(place) or not _ADDRESS.match(place):
        return False
    if not _BUCKET.fullmatch(place):
        raise ConfigError(f"{shown(place)} {_NO_PLACE}")
    return True


def beside(place: str, ending: str) -> str:
    """The place of another store beside this one, by the ending of its name.

    >>> beside("/var/cache/", "-states"), beside("s3://bucket/cache", "-vllm"), beside("s3://bucket", "-vllm")
    ('/var/cache-states', 's3://bucket/cache-vllm', 's3://bucket/-vllm')
    """
    place = place.rstrip("/")
    return f"{place}/{ending}" if re.fullmatch(r"\w+://[^/]+", place) else f"{place}{ending}"


Count = Annotated[int, NumberRange(0)]
"""A number of things or bytes."""
Positive = Annotated[int, NumberRange(1)]
Share = Annotated[float, NumberRange(0, 1)]
MAX_SHARE = 0.8
"""Share of computed rows above which a prompt is not blended, but computed in full."""
Cosine = Annotated[float, NumberRange(-1, 1)]
Seconds = Annotated[float, NumberRange(0)]
Folder = Annotated[str, OnDisk(folder=True)]
Place = Annotated[str, OnDisk(folder=True, store=True)]
"""Address of a store."""
Address = Annotated[str, _FeedAddress()]
AnyPath = Annotated[str, OnDisk()]


def check_fields(
    settings: object, *, flags: bool = False, error: type[DejaKVError] = ConfigError, nul: bool = False
) -> None:
    """Checks every field of a dataclass against its annotation.

    flags  errors name fields as the command line does (`--max-samples`)
    error  what is raised
    nul    texts may contain NUL: they are no settings but somebody's words

    Raises: `error`, naming the first field that is wrong, its value and what to give instead.

    >>> from dejakv import SemanticCacheConfig
    >>> SemanticCacheConfig(blend_share=1.2)
    Traceback (most recent call last):
    dejakv.errors.ConfigError: blend_share=1.2 is too large: give a number from 0 to 1
    """
    for name, (adapter, kind) in _adapters(type(settings)).items():
        value = getattr(settings, name)
        problem = _problem(adapter, kind, value) or _too_much(value, nul)
        if problem is not None:
            label = "--" + name.replace("_", "-") if flags else name
            raise error(f"{label}={shown(value)} {problem}")


def from_mapping(
    kind: Callable[..., T], values: object, where: str = "the settings", removed_names: Mapping[str, str] | None = None
) -> T:
    """An object of settings from plain values (JSON, flags). Lists become tuples.

    removed_names  settings that no longer exist, and what took the place of each

    Raises: ConfigError for what is no mapping, and for an unknown name, listing the known.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {shown(values)} is no object: give names and values")
    mapping = cast(Mapping[Any, Any], values)
    field_names = {item.name for item in fields(cast(Any, kind))}
    for name in mapping:
        if name not in cast(Any, kind).__dataclass_fields__:  # former names are no fields
            if isinstance(name, str) and name in (removed_names or {}):
                raise ConfigError(f"{where}: {name} is no setting any more: {(removed_names or {})[name]}")
            raise ConfigError(f"{where}: unknown key {shown(name)}: known are {', '.join(sorted(field_names))}")

    plain = {
        name: tuple(cast(list[Any], value)) if isinstance(value, list) else value for name, value in mapping.items()
    }
    return kind(**plain)


def shown(value: object) -> str:
    """A value in an error message: short, whatever it is, and of an address nothing that may be a password."""
    # Python refuses to print an integer of more than 4,300 digits.
    if isinstance(value, int) and abs(value) > 10**30:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | NoneType):
        return repr(value)
    if isinstance(value, str):
        # A password stands before the @, or in the query of an address.
        value = re.sub(r"(?s)(://[^?]*\?).*", r"\1...", re.sub(r"(?s)://.*@", "://...@", value))
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... ({len(value)} long)"
    if isinstance(value, list | tuple):
        items = cast(list[object], value)
        inner = ", ".join(shown(item) for item in items[:4]) + (", ..." if len(items) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return f"a {type(value).__name__}"


@cache
def kinds_of(cls: type) -> dict[str, Any]:
    """The annotation of each field of a class of settings."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cast(Any, cls))}


@cache
def helps(cls: type) -> dict[str, str]:
    """Help text of each field, from the docstrings of a class and its bases: lines `name  text`, continued by indented ones.

    >>> from dejakv.config import LifetimeSettings
    >>> helps(LifetimeSettings)["ttl"][:30]
    'seconds for which an entry may'
    """
    texts: dict[str, str] = {}
    # Bases first, so that a class may say it anew.
    for part in reversed(cls.__mro__):
        name = ""
        for line in inspect.cleandoc(part.__doc__ or "").splitlines():
            entry = re.match(r"(\w+)  +(\S.*)", line)
            if entry and entry[1] in getattr(part, "__dataclass_fields__", {}):
                name, texts[entry[1]] = entry[1], entry[2]
            elif name and line.startswith("  "):
                texts[name] += f" {line.strip()}"
            else:
                name = ""

    return texts


def from_text(text: str, kind: Any) -> Any:
    """A value of an annotation from a text, as options and the environment give it: `none` is None where there may be none, a list has
    commas or is JSON. What cannot be read stays a text, which the check then refuses.

    >>> from_text(".2", Share | None), from_text("none", Share | None), from_text("a,b", tuple[str, ...])
    (0.2, None, ('a', 'b'))
    """
    members = [kind, *get_args(kind)]
    if NoneType in members and text.lower() == "none":
        return None
    if get_origin(kind) is tuple:
        items: list[Any] = json.loads(text) if text.startswith("[") else [part for part in text.split(",") if part]
        return tuple(from_text(item, get_args(kind)[0]) if isinstance(item, str) else item for item in items)
    # One level deeper, for `Annotated` within a union.
    members += [inner for each in members for inner in get_args(each)]
    # Before `int`, of which `bool` is a subclass.
    if bool in members:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower(), text)
    try:
        return int(text) if int in members else float(text) if float in members else text
    except ValueError:
        return text


@cache
def _adapters(cls: type) -> dict[str, tuple["TypeAdapter[Any]", Any]]:
    from pydantic import ConfigDict, TypeAdapter

    # Strict: "1" for a number, or 1 for true, is somebody's mistake.
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    return {name: (TypeAdapter(_plain(kind), config=strict), kind) for name, kind in kinds_of(cls).items()}


def _plain(kind: Any) -> Any:
    """The annotation for pydantic, which checks an object's class alone, not its content."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_plain(arguments[0]), *arguments[1:])]
    if origin in (Union, UnionType):
        return Union[tuple(_plain(each) for each in arguments)]  # noqa: UP007
    if origin is tuple:
        return tuple[_plain(arguments[0]), ...]
    if origin is Literal or kind in (str, int, float, bool, Any, NoneType):
        return kind
    return Annotated[Any, _InstanceOf(origin or kind)]


def _problem(adapter: "TypeAdapter[Any]", kind: Any, value: object) -> str | None:
    from pydantic import ValidationError

    try:
        adapter.validate_python(value)
    except ValidationError as error:
        # The first fault alone: it is usually the cause of the others.
        first = error.errors(include_url=False)[0]
        item = next((place for place in first["loc"] if isinstance(place, int)), None)
        says = _says(first["type"], first["msg"], kind, value)
        return says if item is None else f"holds {shown(cast(tuple[object, ...], value)[item])}, which {says}"
    return None


def _says(error: str, message: str, kind: Any, value: object) -> str:
    if error == "dejakv":
        return message
    if error == "tuple_type":
        return "is a list: give a tuple" if isinstance(value, list) else "is no list: give a list, of one if it is one"
    if error == "literal_error":
        choices = next(get_args(each) for each in (kind, *get_args(kind)) if get_origin(each) is Literal)
        return f"is unknown: choose one of {', '.join(map(str, choices))}"
    return _SAYS.get("int_type" if error.startswith("int_") else error, f"is wrong: {message}")


def _too_much(value: object, nul: bool) -> str | None:
    """Fault of a value beyond pydantic's checks: numbers beyond 64 bits, lone surrogates, NUL."""
    if isinstance(value, tuple):
        for item in cast(tuple[object, ...], value):
            if (problem := _too_much(item, nul)) is not None:
                return f"holds {shown(item)}, which {problem}"
    if isinstance(value, int | float) and abs(value) > _LARGEST:
        return "is too large: give less than 2^63"

    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode (a lone surrogate): give text that UTF-8 can encode"
    return "contains a NUL: remove it" if "\0" in value and not nul else None


def named(dotted: str, flag: str) -> Callable[..., Any]:
    """The function or class that a user names as `package.module:factory`. Modules of the current folder are found, as by `python -m`, after all others.

    Raises: ConfigError naming the flag, if it does not import or is not callable.
    """
    module, _, attribute = dotted.partition(":")
    current_dir = os.getcwd()

    if not {"", current_dir} & set(sys.path):
        sys.path.append(current_dir)  # a console script does not look there
    try:
        target = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{flag} {dotted!r} does not import ({error}): give package.module:factory, of an installed package or of the current "
            "folder"
        ) from error

    if not callable(target):
        raise ConfigError(f"{flag} {dotted!r} is not callable: name a function or class")
    return target


def made_by(dotted: str, flag: str, has: tuple[str, ...], *args: Any, **keywords: Any) -> Any:
    """Call a factory with these arguments. `has`: required attributes of its result. Raises: ConfigError naming the flag, if it cannot be
    called so, fails, or makes something else."""
    make = named(dotted, flag)
    try:
        product = make(*args, **keywords)
    except DejaKVError:
        raise
    except Exception as error:  # somebody else's code, which may raise anything; the cause is chained
        raise ConfigError(
            f"{flag} {dotted!r} failed when it was called ({type(error).__name__}: {error}): give a factory that takes "
            f"{', '.join([type(value).__name__ for value in args] + list(keywords)) or 'nothing'}"
        ) from error

    missing = [name for name in has if not hasattr(product, name)]
    if missing:
        raise ConfigError(
            f"{flag} {dotted!r} made a {type(product).__name__}, which has no {missing[0]}: return what the flag asks for"
        )
    return product
