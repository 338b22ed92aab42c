"""An open directory: operations by name reach this directory and follow no link."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from dejakv.errors import StoreError

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_DIRECTORY = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
NOT_FOR_OTHERS = 0o022
"""Mode bits that let others change a file."""


class Directory:
    """Methods raise OSError; ELOOP or ENOTDIR for a link. `path` is for messages, and for SQLite, which opens files by path."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """A directory by its path. Links in it are resolved, because the user gave the path."""
        resolved = path.resolve(strict=True)
        return cls(resolved, os.open(resolved, _FLAGS | os.O_NOFOLLOW))

    def sub(self, name: str, *, make: bool = False) -> "Directory":
        """A directory in this one; `make`: with mode 0700 if it is missing."""
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return Directory(self.path / name, os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=self.descriptor))

    def own(self, name: str) -> "Directory":
        """A directory of this user in this one, made if it is missing. Raises: StoreError for a link or another user's."""
        status = self.status(name)
        if status is not None and not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
            raise StoreError(
                f"{self.path / name} is a link or another user's folder, and is not followed: remove it, or give another folder"
            )
        return self.sub(name, make=True)

    @contextmanager
    def inside(self, name: str) -> Generator["Directory | None"]:
        """Like `sub`, closed afterwards; None if this user has no such directory.

        Raises: OSError if this cannot be determined now.
        """
        try:
            found = self.sub(name)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            yield None
            return
        try:
            yield found if is_ours(os.fstat(found.descriptor)) else None
        finally:
            found.close()

    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    def names(self) -> list[str]:
        # Its own descriptor: listings through one descriptor share its position.
        descriptor = os.open(".", _FLAGS, dir_fd=self.descriptor)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def status(self, name: str) -> os.stat_result | None:
        """Status of a name, without following links; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor. Never waits for the other end of a pipe."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, mode, dir_fd=self.descriptor)

    def remove(self, name: str) -> bool:
        """Unlinks a name, even if it is a link; False if it is missing, a directory, or cannot be unlinked."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def remove_directory(self, name: str) -> bool:
        """Removes an empty directory; False if it is not empty, is a link or cannot be removed."""
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1  # or the number might soon refer to another directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def is_ours(status: os.stat_result) -> bool:
    """Whether this user owns it and nobody else may change it."""
    return status.st_uid == os.geteuid() and not status.st_mode & NOT_FOR_OTHERS


def is_our_file(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISREG(status.st_mode) and is_ours(status)
