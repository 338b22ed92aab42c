"""The folder of a store on disk: where its parts are, how it is opened, and what is done about leftovers and damage.

<folder>/catalog.sqlite   what is known of each chunk          (0600)
<folder>/chunks/ab/...    one safetensors file a chunk         (0600)
<folder>/temporary/...    files that are being written
<folder>/quarantine/...   damaged files, a few of the latest
"""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.store import files
from dejakv.store.catalog import Catalog, damage_marker
from dejakv.store.counters import logger


@dataclass(frozen=True)
class Layout:
    """Paths below a store's folder."""

    folder: Path

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog.sqlite"

    @property
    def chunks(self) -> Path:
        return self.folder / "chunks"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    @property
    def quarantine(self) -> Path:
        return self.folder / "quarantine"


def open_folder(layout: Layout) -> tuple[Catalog, bool]:
    """The catalog of a folder, which is made if it does not exist, and whether a damaged one had to be set aside.

    Raises: StoreError if the folder cannot be used.
    """
    _claim(layout.folder)
    try:
        for folder in (layout.chunks, layout.temporary):
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            if damage_marker(layout.catalog).exists():
                raise sqlite3.DatabaseError("it was found damaged when it was last used")
            return _open_catalog(layout), False
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            logger.warning("the catalog of %s is set aside and the store starts empty: %s", layout.folder, error)
        for suffix in ("", "-wal", "-shm"):
            files.set_aside(layout.catalog.with_name(layout.catalog.name + suffix), layout.quarantine, "catalog")
        files.remove(damage_marker(layout.catalog))
        return _open_catalog(layout), True
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"the store in {layout.folder} cannot be opened ({error}): check its rights and the free space"
        ) from error


def _claim(folder: Path) -> None:
    own = ("catalog.sqlite", "chunks", "temporary", "quarantine")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir() if not path.name.startswith(own) and not _is_store(path)]
        if others:
            raise StoreError(f"{folder} holds other files ({others[0]}): give a new or empty folder for the cache")
        status = folder.stat()
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"{folder} belongs to another user: stored state reveals prompts, give a folder of your own"
            )
        if status.st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise StoreError(f"{folder} cannot be a cache folder ({error}): give a folder you may write to") from error


def _is_store(folder: Path) -> bool:
    """Whether it is a store of its own: tensor-parallel ranks have theirs below the one of a single rank."""
    return (folder / "catalog.sqlite").is_file()


def _open_catalog(layout: Layout) -> Catalog:
    catalog = Catalog(layout.catalog)
    try:
        # In a transaction no other process stands between the rename of a file and the commit of its row.
        with catalog.transaction() as connection:
            known = {file for (file,) in connection.execute("SELECT file FROM chunks")}
            files.sweep(layout.chunks, known, layout.temporary)
    except BaseException:
        catalog.close()
        raise
    return catalog
