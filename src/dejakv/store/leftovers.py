"""What a store's folder holds that no row names: files that a killed process left, and damaged ones, kept for a while."""

import fcntl
import os
from contextlib import suppress

from dejakv.store import names
from dejakv.store.directory import Directory
from dejakv.store.files import remove_chunk

QUARANTINE_FILES = 16
QUARANTINE_BYTES = 64 << 20
CATALOG_OWNER = "catalog"


def sweep(chunks: Directory, temporaries: Directory, known: set[str]) -> set[str]:
    """Removes temporary files that nobody is writing and chunk files without a row; the names of the others that are there.

    Call it while no process can be between its rename and its commit.
    Raises: OSError if it cannot be told what is there.
    """
    for name in filter(names.is_temporary, temporaries.names()):
        _sweep_temporary(temporaries, name)
    present: set[str] = set()
    for group in filter(names.is_group, chunks.names()):
        with chunks.inside(group) as folder:
            for file in folder.names() if folder else ():
                name = f"{group}/{file}"
                if name in known:
                    present.add(name)
                elif folder is not None and names.is_chunk(name) and _is_mine(folder, file):
                    folder.remove(file)
    return present


def _sweep_temporary(temporaries: Directory, name: str) -> None:
    try:
        descriptor = temporaries.open_file(name, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_mine(temporaries, name):
            temporaries.remove(name)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _is_mine(folder: Directory, name: str) -> bool:
    status = folder.status(name)
    return status is not None and status.st_uid == os.geteuid()


def set_aside_chunk(root: Directory, chunks: Directory, name: str, owner: str) -> None:
    """`set_aside` of a chunk's file, if it is there."""
    group, file = name.split("/")
    with suppress(OSError), chunks.inside(group) as folder:
        if folder is not None:
            set_aside(root, folder, file, owner)
    remove_chunk(chunks, name)


def set_aside(root: Directory, folder: Directory, name: str, owner: str) -> None:
    """Moves a damaged file to the quarantine under its owner's mark; the oldest there make room, one too large is removed.

    Never raises: what cannot be moved is removed, what cannot be removed is left to the next sweep.
    """
    status = folder.status(name)
    if status is None:
        return
    try:
        if status.st_size > QUARANTINE_BYTES:
            folder.remove(name)
            return
        with root.sub(names.QUARANTINE, make=True) as quarantine:
            descriptors = {"src_dir_fd": folder.descriptor, "dst_dir_fd": quarantine.descriptor}
            os.rename(name, f"{owner}-{name}", **descriptors)
            _bound(quarantine)
    except OSError:
        folder.remove(name)


def _bound(quarantine: Directory) -> None:
    found = [(quarantine.status(name), name) for name in quarantine.names() if names.is_set_aside(name)]
    held = sorted(((s.st_mtime_ns, s.st_size, name) for s, name in found if s is not None), reverse=True)
    total = 0
    for number, (_, size, name) in enumerate(held):
        total += size
        if number >= QUARANTINE_FILES or total > QUARANTINE_BYTES:
            quarantine.remove(name)


def empty_quarantine(root: Directory, owner: str | None) -> None:
    """Removes what was set aside for `owner`, or everything for None. A catalog holds texts of all, so it goes with any."""
    with root.inside(names.QUARANTINE) as quarantine:
        for name in quarantine.names() if quarantine else ():
            concerned = owner is None or name.startswith((f"{owner}-", f"{CATALOG_OWNER}-"))
            if quarantine is not None and concerned and names.is_set_aside(name):
                quarantine.remove(name)
