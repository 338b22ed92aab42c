"""A store's folder, opened: its parts, its catalog, and the handling of leftovers and damage. The names are in `names`."""

import os
import sqlite3
import stat
from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.store import catalog_rows, catalog_tree, leftovers, names
from dejakv.store.catalog import Catalog
from dejakv.store.claim import entrance, identify
from dejakv.store.connection import connect, is_damage
from dejakv.store.counters import logger
from dejakv.store.directory import NOT_FOR_OTHERS, Directory, is_our_file
from dejakv.store.files import remove_chunk
from dejakv.store.filesystem import refuse_network
from dejakv.store.in_use import InUse
from dejakv.store.marker import FORMAT, Marker, update_marker, write_marker


@dataclass(frozen=True)
class Layout:
    """The open parts of a store's folder, and the lock that marks it as in use."""

    root: Directory
    chunks: Directory
    temporary: Directory
    in_use: InUse

    def close(self) -> None:
        self.in_use.close()
        for part in (self.chunks, self.temporary, self.root):
            part.close()


def open_folder(folder: Path) -> tuple[Layout, Catalog, int]:
    """A store's folder and its catalog, created if necessary, and the number of damaged rows.

    Raises: StoreError if the folder cannot be used.
    """
    refuse_network(folder)
    try:
        with entrance(folder, make=True) as inside:
            marker = identify(inside)
            _make_private(inside)
            if marker is None:
                write_marker(inside)
            layout = _layout(inside)
            try:
                if marker is not None and marker.format != FORMAT:
                    _convert(layout, marker)
                catalog, damaged = _open_catalog(layout)
            except BaseException:
                layout.close()
                raise
            return layout, catalog, damaged
    except BlockingIOError as error:
        raise StoreError(f"the store in {folder} is being deleted by another process: try again") from error
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"{folder} cannot be a cache folder ({error}): give a folder you may write to, with free space"
        ) from error


def _convert(layout: Layout, marker: Marker) -> None:
    """Makes a folder one of this version's format; the catalog brings itself up to date."""
    if not layout.in_use.alone():
        raise StoreError(
            f"the store in {layout.root.path} has the format of an older DejaKV and other processes use it: end them first"
        )
    update_marker(layout.root, marker)
    layout.in_use.share()


def _make_private(directory: Directory) -> None:
    mode = stat.S_IMODE(os.fstat(directory.descriptor).st_mode)
    if mode & NOT_FOR_OTHERS:
        logger.warning(
            "others could write to %s: files in it that others own or may change are not read",
            directory.path,
        )
    if mode & 0o077:
        os.fchmod(directory.descriptor, 0o700)


def _layout(inside: Directory) -> Layout:
    root = Directory.open(inside.path)
    try:
        return Layout(root, _part(root, names.CHUNKS), _part(root, names.TEMPORARY), InUse(root))
    except BaseException:
        root.close()
        raise


def _part(root: Directory, name: str) -> Directory:
    status = root.status(name)
    if status is not None and not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
        raise StoreError(
            f"{root.path / name} is a link or another user's folder, and is not followed: remove it, or "
            "give another folder"
        )
    return root.sub(name, make=True)


def _open_catalog(layout: Layout) -> tuple[Catalog, int]:
    root = layout.root
    for name in (*names.CATALOG_PARTS, names.DAMAGED):
        status = root.status(name)
        if status is not None and not is_our_file(status):
            raise StoreError(
                f"{root.path / name} is not a file that only you may change, so somebody else may have made this cache: give "
                "another folder"
            )
    cause: object = "it was found damaged when it was last used"
    known = root.status(names.CATALOG) is not None
    if known and root.status(names.DAMAGED) is None:
        try:
            return _swept(layout)
        except sqlite3.Error as error:
            if not is_damage(error) and not _says_read_only_but_is_not(root, error):
                raise
            cause = error
    if not layout.in_use.alone():
        raise StoreError(
            f"the catalog of {root.path} is missing or damaged ({cause}) and other processes use it: end them, or give "
            "another folder"
        )
    if known:
        logger.warning("the catalog of %s is set aside and the store starts empty: %s", root.path, cause)
    for name in names.CATALOG_PARTS:
        leftovers.set_aside(root, root, name, leftovers.CATALOG_OWNER)
    root.remove(names.DAMAGED)
    # SQLite creates the file, and no descriptor of it is ever closed here: see `connection`.
    connect(root.path / names.CATALOG, "rwc").close()
    os.chmod(names.CATALOG, 0o600, dir_fd=root.descriptor)
    catalog, damaged = _swept(layout)
    layout.in_use.share()
    return catalog, damaged + known


def _says_read_only_but_is_not(root: Directory, error: sqlite3.Error) -> bool:
    """With one damaged byte in the header SQLite takes a file for one that only a newer version may write."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_READONLY and os.access(names.CATALOG, os.W_OK, dir_fd=root.descriptor)


def _swept(layout: Layout) -> tuple[Catalog, int]:
    """The catalog, made consistent with the files, and the number of rows that were damaged or had lost their file."""
    root = layout.root

    def note_damage() -> None:
        try:
            os.close(root.open_file(names.DAMAGED, os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            logger.warning("the damage of the catalog of %s cannot be recorded: %s", root.path, error)

    catalog = Catalog(root.path / names.CATALOG, admit=layout.in_use.renew, noted_damage=note_damage)
    try:
        # During a transaction no other process is between the rename of a file and the commit of its row.
        with catalog.transaction() as connection:
            gone = catalog_rows.repair(connection)
            known = catalog_rows.files_of(connection)
            present = leftovers.sweep(layout.chunks, layout.temporary, set(known))
            lost = [number for file, number in known.items() if file not in present]
            gone += catalog_rows.delete(connection, lost)
            needed = catalog_tree.prune(connection)
    except BaseException:
        catalog.close()
        raise
    if gone:
        logger.warning("%d damaged rows of %s are removed", len(gone), root.path)
    for removed in needed:
        if removed.file is not None:
            remove_chunk(layout.chunks, removed.file)
    return catalog, len(gone)
