"""A connection to a catalog, shared by several threads, that keeps SQLite's locks intact.

SQLite locks its files with POSIX locks. They belong to the process and to the file, not to a
descriptor: closing *any* descriptor of a file drops all locks that the process has on it. Another
process then considers itself the only one and deletes the write-ahead log of this one
(https://www.sqlite.org/howtocorrupt.html, 2.2). So only SQLite itself opens the files of a catalog;
other code may read their status, rename and unlink them.

A child of `fork` has none of its parent's locks, but a copy of SQLite's list of them, and would
rely on it (2.6 there). So every connection is closed before a fork, and reopened by the next
process that uses it.
"""

import itertools
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

_TRANSIENT_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_TOOBIG,
}
"""Errors of a catalog that may be intact."""


class ConnectionBusy(sqlite3.OperationalError):
    """Another thread or process uses the catalog, and the caller does not wait (any longer)."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


class CatalogDamaged(sqlite3.DatabaseError):
    """The catalog can be read, but its content differs from what was written."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error means damage of the catalog, and no temporary trouble.

    The statements are correct, so an SQL error (no such table) means damage, too.
    """
    # The low byte is the primary code; extended codes add detail above it.
    code = getattr(error, "sqlite_errorcode", None)
    return (
        isinstance(error, sqlite3.DatabaseError)
        and code is not None
        and code & 0xFF not in _TRANSIENT_ERRORS
    )


def set_up(connection: sqlite3.Connection) -> None:
    """Set a connection to use a write-ahead log, checkpoints by hand and overwriting deletion."""
    for setting in (
        "trusted_schema = OFF",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "secure_delete = ON",
        "wal_autocheckpoint = 0",
    ):
        connection.execute(f"PRAGMA {setting}")


class CatalogConnection:
    """A connection that is opened on first use.

    Parameters
    ----------
    path : Path | None
        File of the database. None: a database in memory, which goes on in a child of `fork` as it
        is.
    wait : float
        Seconds that a statement waits for another process's lock.
    admit : Callable[[], None]
        Called before each opening. It raises sqlite3.Error or OSError if the file may not be
        opened.
    noted_damage : Callable[[], None]
        Called when a statement meets damage. SQLite notices damage only where it reads, so the
        caller must remember it.
    prepare : Callable[[sqlite3.Connection], None]
        Called with each new connection, for its settings and checks of the file.

    Attributes
    ----------
    openings : int
        How often a connection was made.
    """

    def __init__(
        self,
        path: Path | None,
        wait: float,
        *,
        admit: Callable[[], None] = lambda: None,
        noted_damage: Callable[[], None] = lambda: None,
        prepare: Callable[[sqlite3.Connection], None] = set_up,
    ) -> None:
        self.path = path
        self._wait = wait
        self._admit = admit
        self._noted_damage = noted_damage
        self._prepare = prepare
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self.lock = threading.RLock()
        self.openings = 0
        self.number = next(_numbers)
        _connections.add(self)

    @contextmanager
    def use(self, *, wait: bool = True) -> Generator[sqlite3.Connection]:
        """Yield the connection, for this thread alone.

        Parameters
        ----------
        wait : bool
            False: raise at once if another thread or process is at work.

        Raises
        ------
        ConnectionBusy
            Without `wait`, if another thread uses the connection.
        sqlite3.Error
            If a statement fails, the database cannot be opened, or after `close`.
        """
        if not self.lock.acquire(blocking=wait):
            raise ConnectionBusy("another thread of this process is writing")
        try:
            connection = self._connection or self._open()
            if not wait:
                # Another process's lock must not make this caller wait either.
                connection.execute("PRAGMA busy_timeout = 0")
            try:
                yield connection
            finally:
                if not wait:
                    connection.execute(f"PRAGMA busy_timeout = {round(1000 * self._wait)}")
        except UnicodeDecodeError as error:
            # Python cannot decode SQLite's message, which quotes the damaged text.
            self._noted_damage()
            raise CatalogDamaged(f"the catalog is damaged: {error.object!r}") from error
        except sqlite3.Error as error:
            if is_damage(error):
                self._noted_damage()
            raise
        finally:
            self.lock.release()

    def close(self) -> None:
        """Close for good: later use raises."""
        with self.lock:
            self._closed = True
            self.disconnect()

    def __del__(self) -> None:
        # The constructor may have failed before the attribute was set.
        if getattr(self, "_connection", None) is not None:
            self.disconnect()

    def disconnect(self) -> None:
        """Close the present connection; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise sqlite3.ProgrammingError("the store is closed")

        self._admit()
        if self.path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        else:
            # `rw` creates nothing: a purged catalog must not come back as an empty file.
            uri = f"file:{quote(os.fsencode(self.path))}?mode=rw"
            connection = sqlite3.connect(
                uri, timeout=self._wait, isolation_level=None, check_same_thread=False, uri=True
            )
            connection.text_factory = _decode_text

        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise

        self.openings += 1
        self._connection = connection
        return connection


def _decode_text(raw: bytes) -> str:
    """Decode text; bytes that are not UTF-8 become surrogates and no error."""
    return raw.decode("utf-8", "surrogateescape")


_connections: weakref.WeakSet[CatalogConnection] = weakref.WeakSet()
_numbers = itertools.count()
_fork_lock = threading.Lock()
_fork_locked: list[CatalogConnection] = []


def _before_fork() -> None:
    # Two threads that fork at once would mix their lists of locks.
    _fork_lock.acquire()
    # In order of number: a thread with two locks took the earlier connection's first.
    for connection in sorted(_connections, key=lambda connection: connection.number):
        connection.lock.acquire()
        _fork_locked.append(connection)
        if connection.path is not None:
            connection.disconnect()


def _after_fork() -> None:
    while _fork_locked:
        _fork_locked.pop().lock.release()
    _fork_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
