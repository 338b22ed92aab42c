"""Deleting a store: name by name, and only files that a store can have written."""

import os
from collections.abc import Callable
from pathlib import Path

from dejakv.errors import StoreError
from dejakv.store import names
from dejakv.store.claim import InUse, entrance, identify
from dejakv.store.directory import Directory


def purge_folder(folder: str | Path) -> int:
    """Deletes the store in a folder, including the stores of tensor-parallel ranks below it; returns the number of removed files.

    A missing or an empty folder is left as it is: 0. Other files in a store's folder are left too, and then also the
    folder; otherwise the folder itself is removed.
    Raises: StoreError if the folder is not a DejaKV store, another process uses it, or it cannot be deleted.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            return 0
        with entrance(folder) as directory:
            # Ranks may have stores below a folder that is not a store itself.
            removed = _purge_ranks(directory) if identify(directory) is None else _purge_alone(directory)
            if removed and not directory.names():
                # By its real path: a link given by the user stays, and then leads nowhere.
                os.rmdir(directory.path)
            return removed
    except OSError as error:
        raise StoreError(f"the store in {folder} cannot be deleted ({error}): check its permissions") from error


def _purge_alone(directory: Directory) -> int:
    in_use = InUse(directory)
    try:
        if not in_use.alone():
            raise StoreError(f"the store in {directory.path} is in use: close it in every process before it is deleted")
        return _purge(directory)
    finally:
        in_use.close()


def _purge(directory: Directory) -> int:
    removed = _purge_ranks(directory)
    for name, known in ((names.SEGMENTS, names.name_of), (names.OLD_CHUNKS, names.old_name_of)):
        with directory.inside(name) as groups:
            removed += _purge_groups(groups, known) if groups else 0
        directory.remove_directory(name)
    for name, fits in ((names.TEMPORARY, names.is_temporary), (names.OLD_QUARANTINE, names.is_old_set_aside)):
        with directory.inside(name) as files:
            removed += sum(files.remove(n) for n in files.names() if fits(n)) if files else 0
        directory.remove_directory(name)
    removed += sum(map(directory.remove, filter(names.is_evidence, directory.names())))
    # The marker is removed last: an interrupted purge leaves a store.
    for name in (*names.CATALOG_PARTS, names.DAMAGED, names.NEW_MARKER, names.MARKER):
        removed += directory.remove(name)
    return removed


def _purge_ranks(directory: Directory) -> int:
    return sum(_purge_rank(directory, name) for name in filter(names.is_rank, directory.names()))


def _purge_rank(directory: Directory, name: str) -> int:
    with directory.inside(name) as below:
        if below is None:
            return 0
        with entrance(below.path) as rank:
            removed = _purge_alone(rank) if identify(rank) is not None else 0
    directory.remove_directory(name)
    return removed


def _purge_groups(groups: Directory, known: Callable[[str, str], str | None]) -> int:
    removed = 0
    for group in filter(names.is_group, groups.names()):
        with groups.inside(group) as files:
            removed += sum(files.remove(n) for n in files.names() if known(group, n)) if files else 0
        groups.remove_directory(group)
    return removed
