"""What a user names as `package.module:factory`: code of their own, imported and called."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dejakv.errors import ConfigError, DejaKVError


def named(dotted: str, flag: str) -> Callable[..., Any]:
    """The function or class of that name. Modules of the current folder are found, as by `python -m`, after all others.

    Raises: ConfigError naming the flag, if it does not import or is not callable.
    """
    module, _, attribute = dotted.partition(":")
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # a console script does not look there
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{flag} {dotted!r} does not import ({error}): give package.module:factory, of an installed package or of the current "
            "folder"
        ) from error
    if not callable(found):
        raise ConfigError(f"{flag} {dotted!r} is not callable: name a function or class")
    return found


def made_by(dotted: str, flag: str, has: tuple[str, ...], *args: Any, **keywords: Any) -> Any:
    """What a factory makes of these arguments. `has`: attributes without which it is not what the flag asks for.

    Raises: ConfigError naming the flag, if it cannot be called so, fails, or makes something else.
    """
    make = named(dotted, flag)
    try:
        made = make(*args, **keywords)
    except DejaKVError:
        raise
    except Exception as error:  # somebody else's code, which may raise anything; the cause is chained
        raise ConfigError(
            f"{flag} {dotted!r} failed when it was called ({type(error).__name__}: {error}): give a factory that takes "
            f"{', '.join([type(value).__name__ for value in args] + list(keywords)) or 'nothing'}"
        ) from error
    missing = [name for name in has if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{flag} {dotted!r} made a {type(made).__name__}, which has no {missing[0]}: return what the flag asks for"
        )
    return made
