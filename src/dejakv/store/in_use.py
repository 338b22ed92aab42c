"""A shared lock on a file in a store's folder, the marker by default, which tells other processes that it is in use.

It belongs to the open file description (`flock`), so unlike SQLite's it is not lost when another descriptor is closed.
"""

import fcntl
import os
import sqlite3
import weakref

from dejakv.store.directory import Directory
from dejakv.store.names import MARKER


class InUse:
    """Locked from the opening of a store to its close. A forked child has no lock until it uses the store.

    Raises: OSError; BlockingIOError while another process deletes or repairs the store.
    """

    def __init__(self, directory: Directory, name: str = MARKER) -> None:
        self._directory = directory
        self._name = name
        self._descriptor = -1
        self._take()
        self._marker = os.fstat(self._descriptor)
        _all.add(self)

    def alone(self) -> bool:
        """Whether no other process uses the store; then none can until `share`. Call it inside the folder's entrance."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.share()  # a failed attempt to change a lock may lose it
            return False
        return True

    def share(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def renew(self) -> None:
        """Takes the lock in a process that has none yet. Raises: sqlite3.OperationalError if the store is gone."""
        if self._descriptor >= 0:
            return
        try:
            self._take()
        except OSError as error:
            raise sqlite3.OperationalError(f"the store in {self._directory.path} no longer exists: {error}") from error
        if not os.path.samestat(self._marker, os.fstat(self._descriptor)):
            self.close()
            raise sqlite3.OperationalError(f"the store in {self._directory.path} has been replaced by another one")

    @property
    def left(self) -> bool:
        """Whether this process has no lock: it is closed, or was taken by the parent of a fork."""
        return self._descriptor < 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _take(self) -> None:
        self._descriptor = self._directory.open_file(self._name, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


_all: weakref.WeakSet[InUse] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Closing the child's copy leaves the parent its lock.
    for sign in list(_all):
        sign.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
