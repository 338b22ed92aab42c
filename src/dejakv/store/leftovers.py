"""Files in a store's folder without a row: leftovers of a killed process, and damaged files, kept for a while."""

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
    """Removes temporary files that nobody is writing and chunk files without a row; returns the names of the other chunk files.

    Call it while no process can be between its rename and its commit.
    Raises: OSError if the content cannot be listed.
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
    """`set_aside` of a chunk's file, if it exists."""
    group, file = name.split("/")
    with suppress(OSError), chunks.inside(group) as folder:
        if folder is not None:
            set_aside(root, folder, file, owner)
    remove_chunk(chunks, name)


def set_aside(root: Directory, folder: Directory, name: str, owner: str) -> None:
    """Moves a damaged file to the quarantine with its owner's mark. The oldest files there make room; a too large file is removed.

    Never raises: a file that cannot be moved is removed; one that cannot be removed is left to the next sweep.
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
    """Removes files set aside for `owner`, or all for None. A catalog has texts of all owners, so it is removed with any."""
    with root.inside(names.QUARANTINE) as quarantine:
        for name in quarantine.names() if quarantine else ():
            concerned = owner is None or name.startswith((f"{owner}-", f"{CATALOG_OWNER}-"))
            if quarantine is not None and concerned and names.is_set_aside(name):
                quarantine.remove(name)
