"""New files of commands: what exists is not overwritten."""

import os
from pathlib import Path

from dejakv.errors import ConfigError


def refuse_existing(path: Path, what: str) -> None:
    """Raises: ConfigError if the path exists, even as a dangling link."""
    if os.path.lexists(path):
        raise ConfigError(f"{what} {str(path)!r} exists and is not overwritten: give another name, or remove it first")
