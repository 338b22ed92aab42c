"""The table of the prototypes' names, docs/prototypes/prototypes.toml, and a list to tick them off."""

import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "prototypes"
TABLE: dict[str, dict[str, dict[str, str]]] = tomllib.loads((DOCS / "prototypes.toml").read_text(encoding="utf-8"))
CHECKS = sorted({row["check"] for rows in TABLE.values() for row in rows.values() if "check" in row})


class Names:
    """The names that one check has to call. `done` fails for those that it did not."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._left = {name for rows in TABLE.values() for name, row in rows.items() if row.get("check") == check}
        assert self._left, check

    def __call__(self, *names: str) -> None:
        """These were called."""
        self._left.difference_update(names)

    def line(self, line: list[str]) -> list[str]:
        """A command line: the names that are words of it were called."""
        for name in list(self._left):
            if name.replace("_", "-") in {word.replace("_", "-") for word in line}:
                self._left.discard(name)
        return line

    def having(self, holder: Any, prefix: str = "") -> None:
        """The names `prefix` + key of a mapping, or of an object's attributes, are there."""
        for name in list(self._left):
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and (key in holder if isinstance(holder, dict) else hasattr(holder, key)):
                self._left.discard(name)

    def done(self) -> None:
        assert not self._left, f"{self.check}: not called: {sorted(self._left)}"
