"""Files of a store on disk: written whole or not at all, mapped for reading, set aside when damaged.

A file gets a unique name, never changes after its rename, and is unlinked by the process that removes its row from the
catalog: a reader that has it open keeps its content. Therefore reading needs no lock.
"""

import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.store.codec import CorruptChunk
from dejakv.store.directory import Directory, is_ours

MAP_FROM_BYTES = 1 << 20

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FILE_OF_OURS = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Entry:
    """A name in a directory."""

    directory: Directory
    name: str

    def remove(self) -> None:
        """Unlinks it if it exists and can be unlinked."""
        self.directory.remove(self.name)


def reason_of(error: OSError) -> str:
    """The reason of a failed write, as counted in refusals: `full`, `read_only` or `error`."""
    if error.errno in _FULL:
        return "full"
    return "read_only" if error.errno in _READ_ONLY else "error"


@contextmanager
def written(temporary: Entry, parts: Iterable[Any]) -> Generator[None]:
    """Writes the buffers to a new file of mode 0600; inside the block it is on the disk, ready for `publish`.

    The file stays locked meanwhile, so that `sweep` of another process does not take it for a leftover. The temporary
    name is always removed afterwards.
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
        temporary.remove()
        os.close(descriptor)


def _new_locked(entry: Entry) -> int:
    while True:
        descriptor = entry.directory.open_file(entry.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # Swept between its creation and its lock.
        os.close(descriptor)


def publish(temporary: Entry, chunks: Directory, name: str) -> None:
    """Gives a finished file its name below `chunks`. Raises: OSError."""
    group, file = name.split("/")
    with chunks.sub(group, make=True) as folder:
        os.rename(temporary.name, file, src_dir_fd=temporary.directory.descriptor, dst_dir_fd=folder.descriptor)


def remove_chunk(chunks: Directory, name: str) -> None:
    """Unlinks a chunk's file if it exists and can be unlinked; otherwise it is left to the next sweep."""
    group, file = name.split("/")
    with suppress(OSError), chunks.inside(group) as folder:
        if folder is not None:
            folder.remove(file)


def there(chunks: Directory, name: str) -> bool:
    """Whether a chunk's file exists. Raises: OSError if this cannot be determined now."""
    group, file = name.split("/")
    with chunks.inside(group) as folder:
        return folder is not None and folder.status(file) is not None


def read_chunk(chunks: Directory, name: str, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of a chunk's file, read-only: a memory map of a large one, a copy of a small one.

    Only a file of `nbytes` bytes that only this user can have written is read.
    (On Python before 3.13 a map keeps a file descriptor open, so small files are copied.)
    Raises: CorruptChunk for anything else, OSError if it is missing or cannot be read now.
    """
    descriptor = _open_chunk(chunks, name)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not is_ours(status):
            raise CorruptChunk(f"{name} is not a file that only this user can have written")
        if status.st_size != nbytes:
            raise CorruptChunk(f"{name} has {status.st_size} bytes in place of {nbytes}")
        return map_file(descriptor, nbytes)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, size: int) -> NDArray[np.uint8]:
    """The bytes of an open file. Raises: OSError."""
    if size < MAP_FROM_BYTES:
        return np.frombuffer(os.read(descriptor, size), dtype=np.uint8)
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    # All pages at once: the checksum reads them right away, and a page fault for each costs more than a copy.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ, **options)
    return np.frombuffer(mapped, dtype=np.uint8)


def _open_chunk(chunks: Directory, name: str) -> int:
    group, file = name.split("/")
    try:
        with chunks.sub(group) as folder:
            return folder.open_file(file, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_FILE_OF_OURS:
            raise CorruptChunk(f"{name} is not a file of this store: {error.strerror}") from error
        raise
