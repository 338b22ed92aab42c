"""Classes of settings: pydantic dataclasses that refuse a wrong value with its name and a remedy.

    @strict_dataclass()
    class MySettings:
        share: Share = 0.15
        \"\"\"Share of rows to compute.\"\"\"
        folder: Folder | None = None
        \"\"\"Folder of the rows; None: memory.\"\"\"

The text below a field is its description: pydantic reads it, and the help of the command line,
docs/reference and JSON schemas are made from it. pydantic checks strictly and is imported where
the first class is made. Beyond its checks a number fits 64 bits, and text is valid Unicode
without NUL.
"""

import inspect
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from dejakv import plugins
from dejakv.errors import ConfigError, DejaKVError

T = TypeVar("T")
_LARGEST = 2**63 - 1
"""What SQLite and a C size hold."""
MEMORY = "memory:"
_BUCKET = re.compile(r"(s3|gs|az)://[^/?#@:\s]+(/[^/?#\s]+)*/?")
_ADDRESS = re.compile(
    r"(?i)[a-z][\w+.-]+:/|(s3|gs|az|memory|file|rediss?|https?):|(s3|gs|az)//|.*://", re.DOTALL
)
"""What is meant as an address, however it is mistyped: no folder is made for it."""
_NO_FOLDER = f"is an address: give a folder on a disk of this machine, or {MEMORY}"
_NO_PLACE = (
    f"is no address of a store: give a folder, {MEMORY}, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX "
    f"or az://CONTAINER/PREFIX; credentials "
    "stand in the environment (docs/explanation/store.md)"
)
_SAYS = {
    "bool_type": "is neither true nor false: give one of them",
    "int_type": "is no whole number: give an integer",
    "float_type": "is no number: give one",
    "finite_number": "is not finite: give a finite number",
    "string_type": "is no text: give a string",
    "bytes_type": "is of the wrong type: give a bytes",
    "dataclass_exact_type": "is of the wrong type: give a {class_name}",
    "is_instance_of": "is of the wrong type: give a {class}",
}
"""What is said of each kind of pydantic's errors."""


class _FieldKind:
    """What an annotation asks beyond its type."""

    def problem(self, value: Any) -> str | None:
        """Return the fault of a value of the right type, with its remedy; None if it fits."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            lambda value: _refuse(value, self.problem(value)), handler(source)
        )


@dataclass(frozen=True)
class NumberRange(_FieldKind):
    """Range of a number, both ends included.

    Attributes
    ----------
    low, high : float
        Its ends.
    above : bool
        The lower end is excluded.
    below : bool
        The upper end is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def problem(self, value: float) -> str | None:
        """Return which end of the range the number passes; None if the number fits."""
        if value > self.low or (value == self.low and not self.above):
            fits = value < self.high or (value == self.high and not self.below)
            return None if fits else f"is too large: give {self}"
        return (
            f"is negative: give {self}"
            if self.low == 0 and value < 0
            else f"is too small: give {self}"
        )

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        if self.above:
            end = "below" if self.below else "up to"
            return f"a number above {self.low:g} and {end} {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class OnDisk(_FieldKind):
    """A path that may or may not exist yet.

    `folder`: what exists must be a folder; `store`: it may be the address of a store.
    """

    folder: bool = False
    store: bool = False

    def problem(self, value: str) -> str | None:
        """Return why the path, or the address of a store, cannot be used; None if it can."""
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


class _FeedAddress(_FieldKind):
    """An address of Redis or Valkey."""

    def problem(self, value: str) -> str | None:
        return (
            None
            if re.match(r"rediss?://[^/]", value)
            else "is no address of a feed: give redis://HOST:PORT/DB, or rediss://"
        )


def is_memory(place: str) -> bool:
    """Return whether a store's address is this process's memory."""
    return place.removesuffix("//") == MEMORY


def in_bucket(place: str) -> bool:
    """Return whether a store's address is in a bucket; otherwise it is memory or a folder.

    Raises
    ------
    ConfigError
        For another address.
    """
    if is_memory(place) or not _ADDRESS.match(place):
        return False
    if not _BUCKET.fullmatch(place):
        raise ConfigError(f"{display(place)} {_NO_PLACE}")
    return True


def sibling_place(place: str, ending: str) -> str:
    """Return the place of another store beside this one, by the ending of its name.

    >>> sibling_place("/var/cache/", "-states"), sibling_place("s3://bucket/cache", "-vllm")
    ('/var/cache-states', 's3://bucket/cache-vllm')
    >>> sibling_place("s3://bucket", "-vllm")
    's3://bucket/-vllm'
    """
    place = place.rstrip("/")
    return f"{place}/{ending}" if re.fullmatch(r"\w+://[^/]+", place) else f"{place}{ending}"


class RegisteredMethod(_FieldKind):
    """A name of a registered method of reuse (`dejakv.plugins`), or one of `others`.

    Parameters
    ----------
    *others : str
        Further names that are taken.
    """

    def __init__(self, *others: str) -> None:
        self.others = others

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that are taken now."""
        return (*self.others, *plugins.names(plugins.METHODS))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticKnownError, core_schema

        def check(value: object) -> object:
            if value not in self.choices:
                raise PydanticKnownError("literal_error", {"expected": quoted(self.choices)})
            # A method whose module is missing is refused here, and not at its first donor.
            if value not in self.others:
                try:
                    plugins.load(plugins.METHODS, cast(str, value))
                except ConfigError as error:
                    return _refuse(value, f"is refused: {error}")
            return value

        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.choices), "type": "string"}


def quoted(choices: Sequence[str]) -> str:
    """Write choices as pydantic does.

    >>> quoted(["off", "exact", "blend"])
    "'off', 'exact' or 'blend'"
    """
    return " or ".join((", ".join(map(repr, choices[:-1])), repr(choices[-1])))


MethodName = Annotated[str, RegisteredMethod()]
"""Name of a method of reuse."""
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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def strict_dataclass(
    *,
    former_names: Mapping[str, str] | None = None,
    flags: bool = False,
    error: type[DejaKVError] = ConfigError,
    nul: bool = False,
    kw_only: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen pydantic dataclass whose wrong values end in one line.

    Parameters
    ----------
    former_names : Mapping[str, str], optional
        Former names of fields, which are still taken, and today's; by default those of the bases.
    flags : bool
        Errors name fields as the command line does (`--max-samples`).
    error : type[DejaKVError]
        Class of the errors, which name the first wrong field, its value and what to give instead.
    nul : bool
        Texts may contain NUL: they are no settings but somebody's words.
    kw_only : bool
        Fields are given by name alone.

    Examples
    --------
    >>> from dejakv import SemanticCacheConfig
    >>> SemanticCacheConfig(blend_share=1.2)
    Traceback (most recent call last):
    dejakv.errors.ConfigError: blend_share=1.2 is too large: give a number from 0 to 1
    """

    def decorate(cls: type[T]) -> type[T]:
        from pydantic import ConfigDict, ValidationError, field_validator
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        def check_limits(value: Any) -> Any:
            return _refuse(value, _limit_problem(value, nul))

        # Strict: "1" for a number, or 1 for true, is somebody's mistake.
        config = ConfigDict(
            strict=True, allow_inf_nan=False, extra="forbid", use_attribute_docstrings=True
        )
        cast(Any, cls)._check_limits = field_validator("*")(check_limits)
        model: Any = pydantic_dataclass(frozen=True, kw_only=kw_only, config=config)(cls)
        if former_names is not None:
            model.__former_names__ = former_names
        check = model.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            for former, name in _former_names(model).items():
                if (value := values.pop(former, None)) is not None:
                    if values.get(name) is not None:
                        raise error(f"{former} is the former name of {name}: give {name} alone")
                    values[name] = value
            try:
                check(self, *args, **values)
            except ValidationError as wrong:
                # The first fault alone: it is usually the cause of the others.
                first = wrong.errors(include_url=False)[0]
                problem = _error_of(model, first, args, values, flags, error)
                raise problem from problem.__cause__

        model.__init__ = init
        return model

    return decorate


def description(cls: type, name: str) -> str:
    """Return the description of a field of a class of settings.

    A field that is declared anew without a text has its base's.

    >>> from dejakv.config import LifetimeSettings
    >>> description(LifetimeSettings, "ttl")[:30]
    'seconds for which an entry may'
    """
    for base in cls.__mro__:
        info: Any = vars(base).get("__pydantic_fields__", {}).get(name)
        if info is not None and info.description:
            return " ".join(info.description.split())
    return ""


def from_mapping(
    kind: Callable[..., T],
    values: object,
    where: str = "the settings",
    removed_names: Mapping[str, str] | None = None,
) -> T:
    """Make an object of settings from plain values (JSON, flags). Lists become tuples.

    Parameters
    ----------
    kind : Callable
        Class of the settings.
    values : object
        Names and values.
    where : str
        Words for their source, in errors.
    removed_names : Mapping[str, str], optional
        Settings that no longer exist, and what took the place of each.

    Returns
    -------
    T
        The settings, checked.

    Raises
    ------
    ConfigError
        For what is no mapping, for an unknown name (with the known ones), and for a removed name
        (with what took its place). A wrong value raises the error of the class.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {display(values)} is no object: give names and values")
    mapping = cast(Mapping[Any, Any], values)
    field_names = {item.name for item in fields(cast(Any, kind))}
    accepted_names = {*field_names, *_former_names(kind)}
    for name in mapping:
        if name not in accepted_names:
            if isinstance(name, str) and name in (removed_names or {}):
                raise ConfigError(
                    f"{where}: {name} is no setting any more: {(removed_names or {})[name]}"
                )
            raise ConfigError(
                f"{where}: unknown key {display(name)}: known are {', '.join(sorted(field_names))}"
            )

    plain = {
        name: tuple(cast(list[Any], value)) if isinstance(value, list) else value
        for name, value in mapping.items()
    }
    return kind(**plain)


def display(value: object) -> str:
    """Write a value for an error message: short, and of an address nothing that may be secret."""
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
        inner = ", ".join(display(item) for item in items[:4]) + (", ..." if len(items) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return f"a {type(value).__name__}"


@cache
def kinds_of(cls: type) -> dict[str, Any]:
    """Return the annotation of each field of a class of settings."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cast(Any, cls))}


def from_text(text: str, kind: Any) -> Any:
    """Read a setting's value from a text, as options and the environment give it.

    A text that does not fit the annotation is returned as it is, for the settings to refuse.

    Parameters
    ----------
    text : str
        The value. `none` in any case is None if the annotation allows None; a tuple is written as
        items with commas between them, or as a JSON list.
    kind : Any
        Annotation of the setting.

    Returns
    -------
    Any
        The value, or the text.

    Raises
    ------
    ValueError
        For a tuple's text that begins with `[` and is no JSON.

    Examples
    --------
    >>> from_text(".2", Share | None), from_text("none", Share | None)
    (0.2, None)
    >>> from_text("a,b", tuple[str, ...])
    ('a', 'b')
    """
    members = [kind, *get_args(kind)]
    if NoneType in members and text.lower() == "none":
        return None
    if get_origin(kind) is tuple:
        items: list[Any] = (
            json.loads(text) if text.startswith("[") else [part for part in text.split(",") if part]
        )
        return tuple(
            from_text(item, get_args(kind)[0]) if isinstance(item, str) else item for item in items
        )
    # One level deeper, for `Annotated` within a union.
    members += [inner for each in members for inner in get_args(each)]
    # Before `int`, of which `bool` is a subclass.
    if bool in members:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
            text.lower(), text
        )
    try:
        return int(text) if int in members else float(text) if float in members else text
    except ValueError:
        return text


def _former_names(cls: Any) -> Mapping[str, str]:
    return getattr(cls, "__former_names__", {})


def _refuse(value: Any, problem: str | None) -> Any:
    """Return the value if it has no problem; pydantic makes a fault of the problem."""
    from pydantic_core import PydanticCustomError

    if problem is not None:
        raise PydanticCustomError("dejakv", "{problem}", {"problem": problem})
    return value


def _error_of(
    model: Any,
    fault: Any,
    args: tuple[Any, ...],
    values: dict[str, Any],
    flags: bool,
    error: type[DejaKVError],
) -> Exception:
    """Translate one of pydantic's faults; a TypeError tells of arguments that do not fit."""
    cause = fault.get("ctx", {}).get("error")
    # Raised by a class's validator or `__post_init__`: pydantic wraps every ValueError.
    if isinstance(cause, DejaKVError) or (isinstance(cause, Exception) and not fault["loc"]):
        return cause

    arguments = inspect.signature(model).bind(*args, **values).arguments
    first, *places = fault["loc"]
    name = cast(str, first if isinstance(first, str) else list(arguments)[first])
    value = arguments[name]
    item = next((place for place in places if isinstance(place, int)), None)
    says = _explain(fault, kinds_of(model)[name], value if item is None else value[item])
    if item is not None:
        says = f"holds {display(value[item])}, which {says}"
    return error(f"{'--' + name.replace('_', '-') if flags else name}={display(value)} {says}")


def _explain(fault: Any, kind: Any, value: object) -> str:
    error = fault["type"]
    if error == "dejakv":
        return fault["msg"]
    if error == "tuple_type":
        return (
            "is a list: give a tuple"
            if isinstance(value, list)
            else "is no list: give a list, of one if it is one"
        )
    if error == "literal_error":
        choices = next(
            each.choices if isinstance(each, RegisteredMethod) else get_args(each)
            for each in _annotations(kind)
            if get_origin(each) is Literal or isinstance(each, RegisteredMethod)
        )
        return f"is unknown: choose one of {', '.join(map(str, choices))}"
    says = _SAYS.get("int_type" if error.startswith("int_") else error)
    return says.format(**fault.get("ctx", {})) if says else f"is wrong: {fault['msg']}"


def _annotations(kind: Any) -> Iterator[Any]:
    """Yield an annotation and all that it is made of."""
    yield kind
    # The values of a Literal are no annotations.
    for inner in () if get_origin(kind) is Literal else get_args(kind):
        yield from _annotations(inner)


def _limit_problem(value: object, nul: bool) -> str | None:
    """Return the fault of a value that pydantic does not check: size, lone surrogates, NUL."""
    if isinstance(value, tuple):
        for item in cast(tuple[object, ...], value):
            if (problem := _limit_problem(item, nul)) is not None:
                return f"holds {display(item)}, which {problem}"
    if isinstance(value, int | float) and abs(value) > _LARGEST:
        return "is too large: give less than 2^63"

    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode (a lone surrogate): give text that UTF-8 can encode"
    return "contains a NUL: remove it" if "\0" in value and not nul else None


def import_object(dotted: str, flag: str) -> Callable[..., Any]:
    """Import the function or class that a user names as `package.module:factory`.

    Modules of the current folder are found, as by `python -m`, after all others.

    Raises
    ------
    ConfigError
        If it does not import or is not callable; it names the flag.
    """
    module, _, attribute = dotted.partition(":")
    current_dir = os.getcwd()

    if not {"", current_dir} & set(sys.path):
        sys.path.append(current_dir)  # a console script does not look there
    try:
        target = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{flag} {dotted!r} does not import ({error}): give package.module:factory, of an "
            f"installed package or of the current "
            "folder"
        ) from error

    if not callable(target):
        raise ConfigError(f"{flag} {dotted!r} is not callable: name a function or class")
    return target


def make_from_factory(
    dotted: str, flag: str, has: tuple[str, ...], *args: Any, **keywords: Any
) -> Any:
    """Call a factory that a user names, with these arguments.

    Parameters
    ----------
    dotted : str
        `package.module:factory`.
    flag : str
        The option that named it, for errors.
    has : tuple[str, ...]
        Attributes that its result must have.
    *args, **keywords : Any
        Its arguments.

    Returns
    -------
    Any
        What the factory made.

    Raises
    ------
    ConfigError
        If it cannot be called so, fails, or makes something else; it names the flag. Errors of this
        package that the factory raises are passed on.
    """
    make = import_object(dotted, flag)
    try:
        product = make(*args, **keywords)
    except DejaKVError:
        raise
    except (
        Exception
    ) as error:  # somebody else's code, which may raise anything; the cause is chained
        raise ConfigError(
            f"{flag} {dotted!r} failed when it was called ({type(error).__name__}: {error}): "
            f"give a factory that takes "
            f"{', '.join([type(value).__name__ for value in args] + list(keywords)) or 'nothing'}"
        ) from error

    missing = [name for name in has if not hasattr(product, name)]
    if missing:
        raise ConfigError(
            f"{flag} {dotted!r} made a {type(product).__name__}, which has no {missing[0]}: "
            f"return what the flag asks for"
        )
    return product
