"""Files of a store on disk: written whole or not at all, mapped for reading, set aside when damaged.

A file gets a name nobody else uses, is never changed after its rename, and is unlinked by whoever takes its row out of the
catalog: a reader that has it open keeps its content. Reading needs no lock therefore.
"""

import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAP_FROM_BYTES = 1 << 20
QUARANTINE_FILES = 16
QUARANTINE_BYTES = 64 << 20

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def reason_of(error: OSError) -> str:
    """Why a write failed, as refusals are counted: `full`, `read_only` or `error`."""
    if error.errno in _FULL:
        return "full"
    return "read_only" if error.errno in _READ_ONLY else "error"


@contextmanager
def written(temporary: Path, parts: Iterable[Any]) -> Generator[None]:
    """Writes the buffers to a new file of mode 0600; inside the block it is on the disk, waiting for `publish`.

    The file stays locked all the while, which tells `sweep` of another process that it is no leftover. Whatever happens,
    the temporary name is gone afterwards.
    Raises: OSError.
    """
    descriptor = _new_locked(temporary)
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        yield
    finally:
        remove(temporary)
        os.close(descriptor)


def _new_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # Swept between its creation and its lock.
        os.close(descriptor)


def read_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, read-only: a memory map of a large one, a copy of a small one.

    (On Python before 3.13 a map holds a file descriptor, so small files are not worth one.)
    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size < MAP_FROM_BYTES:
            return np.frombuffer(os.read(descriptor, size), dtype=np.uint8)
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        # All pages at once: they are read right away for the checksum, and a fault for each costs more than a copy.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ, **options)
        return np.frombuffer(mapped, dtype=np.uint8)
    finally:
        os.close(descriptor)


def new_name(stem: str) -> str:
    """A name no other file of the folder has, in one of 256 subfolders."""
    return f"{stem[:2]}/{stem}-{secrets.token_hex(4)}.safetensors"


def publish(temporary: Path, final: Path) -> None:
    """Gives a finished file its name. Raises: OSError."""
    final.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(temporary, final)


def sweep(folder: Path, known: set[str], temporaries: Path) -> int:
    """Removes what a killed process left: temporary files nobody is writing, and chunk files without a row.

    Call it while no process can be between its rename and its commit. Returns how many files went.
    """
    removed = 0
    for path in temporaries.iterdir():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    for path in folder.glob("*/*"):
        if str(path.relative_to(folder)) not in known:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def set_aside(path: Path, quarantine: Path, owner: str) -> None:
    """Moves a damaged file to the quarantine under its owner's mark; the oldest there make room, one too large is removed.

    Never raises: what cannot be moved is removed, what cannot be removed is left to the next sweep.
    """
    try:
        if path.stat().st_size > QUARANTINE_BYTES:
            path.unlink()
            return
        quarantine.mkdir(mode=0o700, exist_ok=True)
        os.rename(path, quarantine / f"{owner}-{path.name}")
        held = sorted(
            ((item.stat().st_mtime_ns, item.stat().st_size, item) for item in quarantine.iterdir()), reverse=True
        )
        total = 0
        for number, (_, size, item) in enumerate(held):
            total += size
            if number >= QUARANTINE_FILES or total > QUARANTINE_BYTES:
                item.unlink(missing_ok=True)
    except OSError:
        remove(path)


def remove(path: Path) -> None:
    """Unlinks a file if it is there and can be."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def empty_quarantine(quarantine: Path, owner: str | None) -> None:
    """Removes what was set aside for `owner`, or everything for None."""
    if quarantine.is_dir():
        for path in quarantine.glob(f"{owner}-*" if owner else "*"):
            remove(path)
