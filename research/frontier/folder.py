"""The file of cases of a frontier run, from which a stopped run continues."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.experiments.output import make_folder, replace_file

CASES, SETTINGS = "cases.jsonl", "settings.json"
REPORTS = ("frontier.json", "frontier-table.md")
Held = dict[tuple[str, int], dict[str, Any]]


def open_cases(output: str | Path) -> Path:
    """The folder of a run, made if it does not exist.

    Raises: ConfigError if it cannot be made, or has files with these names that no frontier run wrote.
    """
    folder = make_folder(output)
    found = [name for name in (SETTINGS, CASES, *REPORTS) if (folder / name).is_symlink() or (folder / name).exists()]
    if found and not {"model", "epoch", "cells"} <= _settings(folder).keys():
        raise ConfigError(f"--output {str(output)!r} has a {found[0]} that no frontier run wrote: give another folder")
    return folder


def held_cases(folder: Path, settings: dict[str, Any], names: Sequence[str]) -> Held:
    """Finished cases, by kind and number. Raises: ConfigError for a folder with other settings or damaged cases."""
    before = _settings(folder)
    known = {**settings, "cells": list(dict.fromkeys([*before.get("cells", ()), *names]))}
    if before and {**before, "cells": ()} != {**known, "cells": ()}:
        raise ConfigError(f"{folder} has a run of another model or other settings: give another --output, or empty it")
    replace_file(folder / SETTINGS, json.dumps(known, indent=1) + "\n", "--output")
    held: Held = {}
    try:
        for line in _lines(folder / CASES):
            merge(held, line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / CASES} is damaged ({type(error).__name__}: {error}): remove its bad line, or give another --output"
        ) from error
    return held


def merge(held: Held, line: dict[str, Any]) -> None:
    """Adds a line. A case may have several lines, because cells can be measured later. Their seconds are not those of the first line's
    full prefill (the machine may have been busier), so they are left out of the ratios."""
    known = held.setdefault((line["kind"], line["number"]), line)
    if known is not line:
        later = {name: {**row, "seconds": None} for name, row in line["rows"].items()}
        known["rows"] = {**later, **known["rows"]}


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines; a partial last one is removed from the file."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        replace_file(path, text, "--output")
    for line in text.splitlines():
        found = json.loads(line)
        if not isinstance(found["rows"], dict):
            raise TypeError("'rows' is not an object")
        yield found
