"""Objects by name: written whole or not at all, never changed, and removed once nobody needs them.

A read has four answers: the bytes, `ObjectMissing`, `CorruptState`, or `StoreUnavailable`. Only
missing or damaged objects may be forgotten: a store that took an unreachable disk for an empty one
would remove everything.
"""

import errno
import fcntl
import mmap
import os
import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.store.base import CorruptState
from dejakv.store.claim import (
    GROUP,
    SEGMENT,
    SEGMENTS,
    TEMPORARY,
    ensure_folder,
    file_of,
    is_our_file,
    open_file,
)
from dejakv.store.forks import fork_safe_lock

Bytes = NDArray[np.uint8]
"""All bytes of an object."""
MAP_FROM_BYTES = 1 << 20
"""Bytes of a file from which it is mapped; a smaller one is copied."""
MAX_MAPS = 512
"""Maps of the latest files that stay open."""
WRITE_BYTES = 256 << 10
"""Bytes of one write. Larger ones took two to three times the processor time (Linux 6.18, ext4)."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FILE_OF_OURS = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}


class ObjectMissing(Exception):
    """There is no object of this name."""


class StoreUnavailable(Exception):
    """The place cannot tell whether it has the object, or cannot be written now.

    Attributes
    ----------
    reason : str
        `full`, `read_only` or `error`.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        no = error.errno
        self.reason = "full" if no in _FULL else "read_only" if no in _READ_ONLY else "error"


class ReadTimeout(Exception):
    """The deadline of a read has passed."""


class Objects(Protocol):
    """The place of the segments. Thread-safe.

    A subclass implements `put`, `get`, `delete` and `list`; the other methods have defaults. Each
    method may raise `StoreUnavailable`; `get` and `head` also `ObjectMissing` and `CorruptState`.

    Attributes
    ----------
    shared : bool
        Whether others write and remove objects without a word to this catalog.
    """

    shared: bool = False

    @abstractmethod
    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Write an object from buffers, all of it or nothing.

        Returns
        -------
        bool
            False if the name is taken: the present object stays.
        """
        ...

    @abstractmethod
    def get(self, name: str) -> Bytes:
        """Return all bytes, read-only.

        It is the same array as before where nothing can have changed since.
        """
        ...

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        """Return the first bytes, at most `size`, and the size of the object."""
        data = self.get(name)
        return data[:size].tobytes(), data.size

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        ...

    @abstractmethod
    def list(self) -> Iterator[str]:
        """Yield the names of all objects."""
        ...

    def sweep(self) -> None:
        """Remove what killed processes were writing, if the place keeps any of it."""

    def close(self) -> None:
        """Give up what reading has opened, if anything."""


class MemoryObjects(Objects):
    """Objects in the memory of this process."""

    def __init__(self) -> None:
        self._objects: dict[str, Bytes] = {}

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Keep a read-only copy of an object."""
        object_bytes = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        object_bytes.flags.writeable = False
        # Atomic, so that it needs no lock.
        return self._objects.setdefault(name, object_bytes) is object_bytes

    def get(self, name: str) -> Bytes:
        """Return all bytes, the same array each time."""
        try:
            return self._objects[name]
        except KeyError as error:
            raise ObjectMissing(name) from error

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        for name in names:
            self._objects.pop(name, None)

    def list(self) -> Iterator[str]:
        """Return the names of all objects at this moment."""
        return iter(list(self._objects))

    def close(self) -> None:
        """Free all objects."""
        self._objects.clear()


class FolderObjects:
    """Objects as files of a folder: `segments/ab/NAME.safetensors`, written in `temporary/` first.

    Its methods raise the errors of `Objects`, and `sweep` an OSError.

    Large files are mapped, and the maps of the latest ones stay open. A file is looked at before
    each use; with another size, time or place than when it was mapped, it is mapped again. An I/O
    error of the disk under a map kills the process.

    Parameters
    ----------
    root : Path
        Folder of the store.

    Raises
    ------
    StoreError
        If a folder in it is a link or another user's.
    OSError
        If a folder in it cannot be made.
    """

    shared = False

    def __init__(self, root: Path) -> None:
        self._segments, self._temporary = (
            ensure_folder(root / SEGMENTS),
            ensure_folder(root / TEMPORARY),
        )
        self._maps: OrderedDict[str, tuple[tuple[int, ...], Bytes]] = OrderedDict()
        self._lock = fork_safe_lock()

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Write a file under a temporary name, and rename it once it is whole."""
        group, file = file_of(name)
        temporary = self._temporary / file
        try:
            descriptor = _create_locked(temporary)
            try:
                for part in parts:
                    # `os.write` may write less than it was given.
                    rest = memoryview(part).cast("B")
                    while rest:
                        rest = rest[os.write(descriptor, rest[:WRITE_BYTES]) :]

                folder = self._segments / group
                with suppress(FileExistsError):
                    folder.mkdir(0o700)

                # It could lead out of the store, to a place that others may read.
                if folder.is_symlink():
                    raise OSError(errno.ELOOP, "a link is not followed", str(folder))

                # Names are drawn at random: no other process makes this file now.
                created = not os.path.lexists(folder / file)
                if created:
                    # Readers see the whole object or none.
                    temporary.rename(folder / file)
                else:
                    temporary.unlink()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreUnavailable(error) from error

        return created

    def get(self, name: str) -> Bytes:
        """Return all bytes of a file: a map of a large one, a copy of a small one."""
        with self._lock:
            cached_map = self._maps.get(name)
            if cached_map is not None:
                self._maps.move_to_end(name)
        if cached_map is not None:
            with suppress(OSError):
                # Plain strings: this runs for each read, and a `Path` costs more.
                status = os.lstat("/".join((str(self._segments), *file_of(name))))
                if _signature(status) == cached_map[0]:
                    return cached_map[1]

            self._forget(name)

        descriptor = self._open(name)
        try:
            status = self._checked(descriptor, name)
            data = _read(descriptor, status)
            # Small ones are copies already, and cost little to read again.
            if status.st_size >= MAP_FROM_BYTES:
                with self._lock:
                    self._maps[name] = (_signature(status), data)
                    while len(self._maps) > MAX_MAPS:
                        self._maps.popitem(last=False)

            return data
        except OSError as error:
            raise StoreUnavailable(error) from error
        finally:
            os.close(descriptor)

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        """Return the first bytes and the size of a file."""
        descriptor = self._open(name)
        try:
            return os.pread(descriptor, size, 0), self._checked(descriptor, name).st_size
        except OSError as error:
            raise StoreUnavailable(error) from error
        finally:
            os.close(descriptor)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; missing ones are ignored."""
        for name in names:
            # First: no reader may get the old map after the file has left.
            self._forget(name)
            try:
                os.unlink(self._path(name))
            except (ObjectMissing, FileNotFoundError, IsADirectoryError):
                continue
            except OSError as error:
                raise StoreUnavailable(error) from error

    def list(self) -> Iterator[str]:
        """Yield the names of all files named like segments, except in folders that are links."""
        try:
            for group in filter(GROUP.fullmatch, os.listdir(self._segments)):
                folder = self._segments / group
                for file in (
                    os.listdir(folder) if folder.is_dir() and not folder.is_symlink() else ()
                ):
                    # Any other file would be looked for in another folder, and be reported missing.
                    if SEGMENT.fullmatch(file) and file.startswith(group):
                        yield file.removesuffix(".safetensors")
        except OSError as error:
            raise StoreUnavailable(error) from error

    def sweep(self) -> None:
        """Remove what killed processes were writing.

        Raises
        ------
        OSError
            If the folder cannot be listed.
        """
        for file in filter(SEGMENT.fullmatch, os.listdir(self._temporary)):
            with suppress(OSError):
                # A file that is still being written is locked: it raises, and stays.
                descriptor = open_file(self._temporary / file, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(self._temporary / file)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        """Forget all maps."""
        with self._lock:
            self._maps.clear()

    def _checked(self, descriptor: int, name: str) -> os.stat_result:
        status = os.fstat(descriptor)
        if not is_our_file(status):
            raise CorruptState(f"{name} is not a file that only this user can have written")
        return status

    def _forget(self, name: str) -> None:
        with self._lock:
            self._maps.pop(name, None)

    def _path(self, name: str) -> str:
        """Return the path of an object's file.

        Raises
        ------
        ObjectMissing
            If its folder is a link, which is not followed.
        """
        group, file = file_of(name)
        folder = f"{self._segments}/{group}"
        if os.path.islink(folder):
            raise ObjectMissing(name)
        return f"{folder}/{file}"

    def _open(self, name: str) -> int:
        try:
            return open_file(self._path(name), os.O_RDONLY)
        except FileNotFoundError as error:
            raise ObjectMissing(name) from error
        except OSError as error:
            if error.errno in _NO_FILE_OF_OURS:
                raise CorruptState(f"{name} is a link or no file") from error
            raise StoreUnavailable(error) from error


def _create_locked(path: Path) -> int:
    """Create a file and return its descriptor, locked: no other process sweeps it."""
    while True:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # `sweep` of another process may have come between the creation and the lock.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(descriptor: int, status: os.stat_result) -> Bytes:
    """Return a map of a large file, a copy of a small one.

    Before Python 3.13 a map keeps a descriptor open.
    """
    size = status.st_size
    if size < MAP_FROM_BYTES:
        return np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)

    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    # All pages at once: the checksum reads them right away, and a page fault for each costs more
    # than a copy. A file of holes is none of ours, and filling memory with its zeros would take
    # minutes.
    whole = status.st_blocks * 512 >= size
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if whole else 0)
    return np.frombuffer(
        mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ, **options), dtype=np.uint8
    )
