"""Output files of commands: written completely or not at all, and never over foreign files."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dejakv.errors import ConfigError
from dejakv.settings import display

SETTINGS, SAMPLES, SUMMARY = "settings.json", "samples.jsonl", "summary.json"
SIGNED = "dejakv_version"


def make_folder(path: str | Path, flag: str = "--output") -> Path:
    """Return the folder, made if it does not exist; a ConfigError names the flag if that fails."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mkdir is content with an existing folder that nobody may write to.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{flag} {str(path)[:200]!r} cannot be created ({_reason(error)}): give a folder you"
            " may write to"
        ) from error

    return folder


def run_folder(output: str | Path) -> Path:
    """Return a folder for the files of a run, made if it does not exist.

    Files of an earlier run may be in it, and the caller may replace them.

    Raises
    ------
    ConfigError
        If the folder cannot be made, or has files with these names that no run wrote.
    """
    folder = make_folder(output)
    # lexists, as a dangling link of that name is not ours either.
    run_files = [name for name in (SETTINGS, SAMPLES, SUMMARY) if os.path.lexists(folder / name)]
    if run_files and not any(
        SIGNED in read_json_or_empty(folder / name) for name in (SETTINGS, SUMMARY)
    ):
        raise ConfigError(
            f"--output {str(output)!r} has a {run_files[0]} that no run wrote: give another folder"
        )
    return folder


@contextmanager
def locked(path: Path, flag: str, busy: str) -> Iterator[None]:
    """Lock a folder, or a file that is made if it does not exist.

    The kernel frees the lock of a killed process, and a file system without locks has none.

    Raises
    ------
    ConfigError
        With the text `busy` if another process has the lock, and if the path cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"{flag} {display(str(path))} cannot be written ({error.strerror})"
        ) from error

    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(busy) from error
        yield
    finally:
        os.close(descriptor)


def write_run(
    output: str | Path | None,
    summary: dict[str, Any],
    *,
    lines: Sequence[dict[str, Any]] | None = None,
) -> Path | None:
    """Write the files at the end of a run: the summary, and the samples' lines if there are any.

    Returns
    -------
    Path or None
        The folder; None without an output.

    Raises
    ------
    ConfigError
        If the folder is not for a run (`run_folder`), or a file cannot be written.
    """
    if output is None:
        return None

    folder = run_folder(output)
    replace_file(folder / SUMMARY, json.dumps(summary, indent=2) + "\n", "--output")
    if lines is not None:
        replace_file(
            folder / SAMPLES, "".join(json.dumps(line) + "\n" for line in lines), "--output"
        )
    return folder


def replace_file(path: Path, text: str, flag: str) -> None:
    """Create or replace a text file, completely or (on failure) not at all.

    A link is replaced and not followed. A ConfigError names the flag.
    """
    # In the same folder, as a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        try:
            temporary.write_text(text, encoding="utf-8", newline="")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(path)!r} cannot be written ({_reason(error)}): give another path"
        ) from error


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing or has other content gives an empty one."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def refuse_existing(path: Path, label: str) -> None:
    """Raise a ConfigError if the path exists, even as a dangling link."""
    if os.path.lexists(path):
        raise ConfigError(
            f"{label} {str(path)!r} exists and is not overwritten: give another name, or remove it"
            " first"
        )
