"""Names of experiments, which are also names of folders."""

import unicodedata
from collections.abc import Iterable

from dejakv.errors import ConfigError
from dejakv.settings import shown

_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
_LONGEST = 200
"""In bytes: file systems allow 255, and a prefix or suffix may be added."""


def check_names(names: Iterable[object]) -> None:
    """Raises: ConfigError for the first name that is not a plain file name on every system, or that means the folder of another one."""
    seen: dict[str, str] = {}
    for name in names:
        problem = _problem(name)
        if problem is not None or not isinstance(name, str):
            raise ConfigError(f"an experiment cannot be named {shown(name)}: {problem}")
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folded in seen:
            raise ConfigError(
                f"every experiment of a sweep needs its own name: {shown(seen[folded])} and {shown(name)} are the same folder"
            )
        seen[folded] = name


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return "give every experiment a 'name', a string"
    if not name.strip() or name != name.strip() or name.startswith(".") or name.endswith("."):
        return "a folder is named after it, so give it letters, without dots or white space around them"
    if any(sign in '/\\:*?"<>|' or unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in name):
        return 'a folder is named after it, so leave out / \\ : * ? " < > | and what does not print'
    if name.split(".")[0].lower() in _RESERVED:
        return "Windows keeps that name for a device, give another"
    if len(name.encode()) > _LONGEST:
        return f"it is longer than {_LONGEST} bytes, give a shorter one and put the rest in 'notes'"
    return None
