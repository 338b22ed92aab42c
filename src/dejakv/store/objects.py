"""Objects by name: written whole or not at all, never changed, and removed only once nobody needs them.

A read has three answers: the bytes, `ObjectMissing`, or `StoreUnavailable`. Only missing or damaged objects may be forgotten: a store that took an
unreachable disk for an empty one would remove everything.
"""

import errno
import fcntl
import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.store.base import CorruptChunk
from dejakv.store.claim import GROUP, SEGMENT, SEGMENTS, TEMPORARY, file_of, is_our_file, open_file, own_folder
from dejakv.store.forks import fork_safe_lock

Bytes = NDArray[np.uint8]
MAP_FROM_BYTES = 1 << 20
KEPT_MAPS = 512
WRITTEN_AT_ONCE = 256 << 10
"""Bytes of an object. Larger writes took two to three times the processor time (Linux 6.18, ext4)."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FILE_OF_OURS = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}


class ObjectMissing(Exception):
    """There is no such object."""


class StoreUnavailable(Exception):
    """The object's presence cannot be told, or it cannot be written now. `reason`: `full`, `read_only` or `error`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        no = error.errno
        self.reason = "full" if no in _FULL else "read_only" if no in _READ_ONLY else "error"


class ReadTimeout(Exception):
    """The deadline of a read has passed."""


class Objects(Protocol):
    """Where segments are kept. Thread-safe; each method raises `StoreUnavailable`, and reading ones `ObjectMissing` and `CorruptChunk`.

    shared  whether others write and remove objects without a word to this catalog
    """

    shared: bool

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Write an object from buffers, all of it or nothing; False if the name is taken, whose object stays."""
        ...

    def get(self, name: str) -> Bytes:
        """All bytes, read-only. The same array as before where nothing can have changed since."""
        ...

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        """The first bytes, at most `size`, and the size of the object."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        ...

    def list(self) -> Iterator[str]:
        """Names of all."""
        ...

    def sweep(self) -> None:
        """Removes what killed processes were writing."""
        ...

    def close(self) -> None: ...


class MemoryObjects:
    """Objects of this process alone."""

    shared = False

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        object_bytes = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        object_bytes.flags.writeable = False
        # Atomic, so that it needs no lock.
        return self._held.setdefault(name, object_bytes) is object_bytes

    def get(self, name: str) -> Bytes:
        try:
            return self._held[name]
        except KeyError as error:
            raise ObjectMissing(name) from error

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        data = self.get(name)
        return data[:size].tobytes(), data.size

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._held.pop(name, None)

    def list(self) -> Iterator[str]:
        return iter(list(self._held))

    def sweep(self) -> None:
        pass

    def close(self) -> None:
        self._held.clear()


class FolderObjects:
    """Objects as files of a folder: `segments/ab/NAME.safetensors`, and `temporary/` for what is being written.

    Large files are mapped, and the maps of the latest are kept: a file is looked at before each use, and one that has another
    size, time or place than when it was mapped is mapped again. An I/O error of the disk under a map kills the process.
    """

    shared = False

    def __init__(self, root: Path) -> None:
        self._segments, self._temporary = own_folder(root / SEGMENTS), own_folder(root / TEMPORARY)
        self._kept: OrderedDict[str, tuple[tuple[int, ...], Bytes]] = OrderedDict()
        self._lock = fork_safe_lock()

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        group, file = file_of(name)
        temporary = self._temporary / file
        try:
            descriptor = _created(temporary)
            try:
                for part in parts:
                    # `os.write` may write less than it was given.
                    rest = memoryview(part).cast("B")
                    while rest:
                        rest = rest[os.write(descriptor, rest[:WRITTEN_AT_ONCE]) :]

                folder = self._segments / group
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
                # It could lead out of the store, to a place that others may read.
                if folder.is_symlink():
                    raise OSError(errno.ELOOP, "a link is not followed", str(folder))
                created = not os.path.lexists(folder / file)  # names are drawn at random: nobody else makes it now
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
        with self._lock:
            cached_map = self._kept.get(name)
            if cached_map is not None:
                self._kept.move_to_end(name)
        if cached_map is not None:
            with suppress(OSError):
                if _signature(os.lstat("/".join((str(self._segments), *file_of(name))))) == cached_map[0]:
                    return cached_map[1]
            self._forget(name)

        descriptor = self._open(name)
        try:
            status = self._checked(descriptor, name)
            data = _read(descriptor, status.st_size)
            # Small ones are copies already, and cost little to read again.
            if status.st_size >= MAP_FROM_BYTES:
                with self._lock:
                    self._kept[name] = (_signature(status), data)
                    while len(self._kept) > KEPT_MAPS:
                        self._kept.popitem(last=False)

            return data
        except OSError as error:
            raise StoreUnavailable(error) from error
        finally:
            os.close(descriptor)

    def head(self, name: str, size: int) -> tuple[bytes, int]:
        descriptor = self._open(name)
        try:
            return os.pread(descriptor, size, 0), self._checked(descriptor, name).st_size
        except OSError as error:
            raise StoreUnavailable(error) from error
        finally:
            os.close(descriptor)

    def delete(self, names: Sequence[str]) -> None:
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
        try:
            for group in filter(GROUP.fullmatch, os.listdir(self._segments)):
                folder = self._segments / group
                for file in os.listdir(folder) if folder.is_dir() and not folder.is_symlink() else ():
                    # Any other file would be looked for in another folder, and be reported missing.
                    if SEGMENT.fullmatch(file) and file.startswith(group):
                        yield file.removesuffix(".safetensors")
        except OSError as error:
            raise StoreUnavailable(error) from error

    def sweep(self) -> None:
        """Removes what killed processes were writing. Raises: OSError if it cannot be listed."""
        for file in filter(SEGMENT.fullmatch, os.listdir(self._temporary)):
            with suppress(OSError):
                descriptor = open_file(self._temporary / file, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(self._temporary / file)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    def _checked(self, descriptor: int, name: str) -> os.stat_result:
        status = os.fstat(descriptor)
        if not is_our_file(status):
            raise CorruptChunk(f"{name} is not a file that only this user can have written")
        return status

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)

    def _path(self, name: str) -> str:
        """Path of an object's file. Raises: Missing if its folder is a link, which is not followed."""
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
                raise CorruptChunk(f"{name} is a link or no file") from error
            raise StoreUnavailable(error) from error


def _created(path: Path) -> int:
    """Create a file and return its descriptor, locked: no other process removes it as left behind."""
    while True:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # `sweep` of another process may have come between the creation and the lock.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # swept between its creation and its lock


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(descriptor: int, size: int) -> Bytes:
    """A map of a large file, a copy of a small one: before Python 3.13 a map keeps a descriptor open."""
    if size < MAP_FROM_BYTES:
        return np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    # All pages at once: the checksum reads them right away, and a page fault for each costs more than a copy.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ, **options), dtype=np.uint8)
