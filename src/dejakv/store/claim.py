"""Decides which folders are stores, and which may become one. Nothing is opened, swept or removed in any other folder.

A folder is a store if it has DejaKV's marker. A folder of 0.1.0 has none; it is recognised by its catalog and gets one. An
empty folder becomes a store. Any other is refused.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.store import names
from dejakv.store.connection import connect
from dejakv.store.counters import logger
from dejakv.store.directory import Directory, is_our_file
from dejakv.store.marker import Marker, read_marker, write_marker

_CATALOG_VERSIONS = (1, 2)
"""Of catalogs that may stand in a folder without a marker: made by 0.1.0, or left when a damaged marker was removed."""
_LEGACY_TABLES = {"chunks", "totals", "removed"}
_LOCK_SECONDS = 30.0


@contextmanager
def entrance(folder: Path, *, make: bool = False) -> Generator[Directory]:
    """A folder of this user, locked: processes open or purge it one at a time. `make`: create it if it is missing.

    Raises: StoreError if it belongs to another user or another process keeps it locked, OSError.
    """
    directory = _locked(folder, make)
    try:
        yield directory
    finally:
        # Explicitly: a child forked meanwhile would keep the lock of a descriptor that is only closed.
        fcntl.flock(directory.descriptor, fcntl.LOCK_UN)
        directory.close()


def identify(directory: Directory) -> Marker | None:
    """The marker of a store; an old store gets one. None for an empty folder. Call it inside `entrance`.

    Raises: StoreError for any other folder and for a store of a newer format, OSError.
    """
    marker = read_marker(directory)
    if marker is not None:
        return marker
    found = [name for name in directory.names() if name != names.NEW_MARKER and not _is_store_below(directory, name)]
    if not found:
        return None
    stranger = _stranger(directory, found)
    if stranger is None and _has_legacy_catalog(directory):
        logger.info("the store in %s was made by an older version and gets a marker", directory.path)
        return write_marker(directory)
    raise StoreError(
        f"{directory.path} holds other files ({stranger or names.CATALOG}) and no {names.MARKER}, so it is not a cache of "
        "DejaKV and is left alone: give a new or empty folder for the cache"
    )


def _locked(folder: Path, make: bool) -> Directory:
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = Directory.open(folder)
        try:
            if os.fstat(directory.descriptor).st_uid != os.geteuid():
                raise StoreError(
                    f"{folder} belongs to another user: stored state reveals prompts, so give a folder of your own"
                )
            _lock(directory)
            if directory.is_in_place():
                return directory
        except BaseException:
            directory.close()
            raise
        directory.close()  # purged since it was opened


def _lock(directory: Directory) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has kept {directory.path} locked for {_LOCK_SECONDS:.0f} s: end it, or try again"
                ) from error
            time.sleep(0.005)


def _is_store_below(directory: Directory, name: str) -> bool:
    """Whether it is a separate store: tensor-parallel ranks have their stores below the one of a single rank."""
    with directory.inside(name) as below:
        return below is not None and any(is_our_file(below.status(file)) for file in (names.MARKER, names.CATALOG))


def _stranger(directory: Directory, found: list[str]) -> str | None:
    """A file there that an old version cannot have written, if any."""
    files = {*names.CATALOG_PARTS, names.DAMAGED}
    for name in found:
        if name in files or names.is_evidence(name):
            if not is_our_file(directory.status(name)):
                return name
        elif name == names.CHUNKS:
            with directory.inside(name) as chunks:
                groups = chunks.names() if chunks else [""]
                for group in groups:
                    with (chunks or directory).inside(group) as inner:
                        members = inner.names() if inner and names.is_group(group) else [""]
                    strange = [member for member in members if not names.is_chunk(f"{group}/{member}")]
                    if strange:
                        return os.path.join(name, group, strange[0])
        elif name in (names.TEMPORARY, names.QUARANTINE):
            known = names.is_temporary if name == names.TEMPORARY else names.is_set_aside
            with directory.inside(name) as inner:
                strange = [member for member in (inner.names() if inner else [""]) if not known(member)]
            if strange:
                return os.path.join(name, strange[0])
        else:
            return name
    return None


def _has_legacy_catalog(directory: Directory) -> bool:
    if not is_our_file(directory.status(names.CATALOG)):
        return False
    # Without a log it is opened in a mode that creates no files beside it.
    log = directory.status(names.CATALOG_PARTS[1])
    mode = "ro" if log is not None and log.st_size else "ro&immutable=1"
    try:
        with closing(connect(directory.path / names.CATALOG, mode)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        logger.warning("%s is not recognised as a catalog: %s", directory.path / names.CATALOG, error)
        return False
    return version in _CATALOG_VERSIONS and tables >= _LEGACY_TABLES and tables <= _LEGACY_TABLES | {"sqlite_sequence"}
