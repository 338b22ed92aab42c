"""Options of commands, made from classes of settings, where each name and default stands."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from dejakv.config import FORMER
from dejakv.errors import ConfigError, printable
from dejakv.settings import description, from_text, kinds_of


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, in which names and texts of others cannot control the terminal."""
    typer.echo(printable(text), err=err)


Groups = Mapping[str, Sequence[str]]
"""Settings whose options `--help` shows, by the title of their group.

`--help-all` shows the others too.
"""

SETTINGS_HELP = "NAME=VALUE of any setting, such as blend.share=.2; repeatable."
FORMER_OPTIONS = {new: (f"--{old.replace('_', '-')}",) for old, new in FORMER.items()}
_WITH_COMMAS = ("arms", "costs")


def _read_list(name: str, text: str, kind: Any) -> Any:
    try:
        return from_text(text, kind)
    except ValueError as error:
        raise ConfigError(
            f"--{name.replace('_', '-')} {text!r} is not valid JSON ({error}): give a list like"
            ' ["a", "b"], or a,b'
        ) from error


def ray_option(panel: str | None = None, *, hidden: bool = False) -> Any:
    """Return the option `--ray [ADDRESS]`; `main` writes `local` where the address is left out."""
    text = (
        "Work on a cluster of Ray: HOST:PORT, ray://HOST:PORT or auto; without an address on one of"
        " this machine. Paths must mean the same on all its machines."
    )
    return typer.Option(
        "--ray", metavar="[ADDRESS]", help=text, rich_help_panel=panel, hidden=hidden
    )


def help_all(context: typer.Context, enabled: bool) -> None:
    """Show every option and end: the callback of `--help-all`."""
    if enabled:
        for option in context.command.params:
            option.hidden = False  # pyright: ignore[reportAttributeAccessIssue]
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show all options.",
        callback=help_all,
        is_eager=True,
        rich_help_panel="More",
    ),
]


def settings_command(
    body: Callable[..., None],
    settings: Sequence[type],
    groups: Groups,
    names: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    more: Mapping[str, Sequence[str]] | None = None,
) -> Callable[..., None]:
    """Return a command with the options of `body`, and one for each field of some classes.

    A switch that is on by default gets no option unless `names` has one; `--set` changes it.

    Parameters
    ----------
    body : callable
        The command. It gets the values that were given as `given`, by the name of their option.
    settings : sequence of type
        Classes of settings.
    groups : mapping of str to sequence of str
        Settings whose options `--help` shows, by the title of their group.
    names : mapping of str to str, optional
        Options that are not named like their setting: `disable_...` switches a setting off, others
        are given once for each item.
    skip : sequence of str
        Settings without an option.
    more : mapping of str to sequence of str, optional
        Further names of options.
    """
    body_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(body).parameters.values()
        if parameter.name != "given"
    ]

    named = {of: option for option, of in (names or {}).items()}
    every = {
        named.get(name, name): _option(
            named.get(name, name), name, kind, part, groups, (more or {}).get(name, ())
        )
        for part in settings
        for name, kind in kinds_of(part).items()
        if name not in skip
    }

    # Settings that are on by default have no option, and `--set` alone changes them.
    setting_options = [option for option in every.values() if option is not None]
    kinds = {
        named.get(name, name): kind for part in settings for name, kind in kinds_of(part).items()
    }

    def run(**values: Any) -> None:
        # None and [] are "not given": a default here would override a preset.
        raw_values = {option.name: values.pop(option.name) for option in setting_options}
        option_values = {
            name: _read_list(name, value, kinds[name]) if name in _WITH_COMMAS else value
            for name, value in raw_values.items()
            if value is not None and value != []
        }
        body(**values, given=option_values)

    # Groups come in the order of their titles, in each of them options in the order of the group.
    order = [named.get(name, name) for names in groups.values() for name in names]
    setting_options.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    titles = list(groups)
    parameters = sorted(
        [*body_parameters, *setting_options],
        key=lambda one: titles.index(_panel(one)) if _panel(one) in titles else len(titles),
    )

    # typer makes its options from signature, annotations and docstring.
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = body.__doc__
    return run


def _panel(option: inspect.Parameter) -> str:
    return str(option.annotation.__metadata__[0].rich_help_panel)


def _option(
    name: str, field: str, kind: Any, part: type, groups: Groups, more: Sequence[str]
) -> inspect.Parameter | None:
    """Return the option of a setting.

    A setting that is on by default and has no switch gets none: `--set` alone changes it.
    """
    title = next((title for title, names in groups.items() if field in names), None)
    default = getattr(part, field, None)
    text = description(part, field)
    members = {kind, *get_args(kind)}
    flag, typed = f"--{name.replace('_', '-')}", Any

    if name.startswith("disable_"):
        typed, text = bool, f"Switch off: {text}"
    elif bool in members:
        if default is True:
            return None
        typed = bool
    elif get_origin(kind) is tuple:
        typed, text = (str, text) if name in _WITH_COMMAS else (list[str], f"{text}; repeatable")
    else:
        inner = {
            get_args(each)[0] if get_origin(each) is Annotated else each
            for each in members - {NoneType}
        }
        typed = next((each for each in (int, float) if each in inner), str)

    text = _with_default(text, default)
    option = typer.Option(
        flag, *more, help=text, rich_help_panel=title or "Other settings", hidden=title is None
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[typed | None, option],
    )


def _with_default(text: str, default: Any) -> str:
    """Turn a help text into a sentence, with its default in brackets."""
    # A help text may say what None means, which is then the default that a reader sees.
    default_match = re.search(r"; None: (.+)$", text)
    if default_match is not None:
        text, default = text[: default_match.start()], default_match[1]

    text = (text[0].upper() + text[1:]).replace("`", "")
    if default is None or default == "" or default == () or isinstance(default, bool):
        return f"{text}."

    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"{text} (default: {size(default)})."


def size(value: Any) -> str:
    """Format a number; multiples of MiB and GiB get their unit."""
    # Other numbers would lose digits with a unit.
    for unit, number in (("GiB", 1024**3), ("MiB", 1024**2)):
        if isinstance(value, int) and value >= number and value % number == 0:
            return f"{value // number} {unit}"
    return str(value).replace("`", "")
