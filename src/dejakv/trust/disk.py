"""Evidence in a cache folder: one SQLite file, which several processes share.

Each label is one short `BEGIN IMMEDIATE` transaction with its name, so that none is counted twice and none overwrites another. A damaged
file is left as it is, since another process may have it open, and the next of ten names is used: a cold start, which is counted.

A draw that is to be labelled is written before its label is waited for, under the name of its process, which keeps a file of that name locked:
what an ended process did not tell is found by the next one.
"""

import logging
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from dejakv.errors import StoreError
from dejakv.store import names
from dejakv.store.claim import entrance
from dejakv.store.connection import Connection, Damaged, connect, is_damage
from dejakv.store.directory import Directory, is_our_file
from dejakv.store.in_use import InUse
from dejakv.trust import forks
from dejakv.trust.codec import decoded, encoded
from dejakv.trust.draw import ClassKey, Draw
from dejakv.trust.features import TIME_SHARE
from dejakv.trust.ledger import MOST_CLASSES, MOST_EPOCHS, REMEMBERED, Change, Ledger, MemoryLedger
from dejakv.trust.settings import TrustSettings
from dejakv.trust.state import State
from dejakv.trust.terms import fingerprint

T = TypeVar("T")
logger = logging.getLogger("dejakv.trust")

VERSION = 1
APPLICATION = 0x444B5654
"""SQLite's `application_id` of our files: "DKVT"."""

FILES = 10
_WAIT_SECONDS = 1.0
_WRITES_PER_CHECKPOINT = 256
_WHERE = "epoch = ? AND method = ? AND setting = ? AND owner = ? AND terms = ?"
_KEY = "epoch, method, setting, owner, terms"
_TURN = "REPLACE INTO changed SELECT ?, ?, ?, ?, ?, coalesce(max(turn), 0) + 1 FROM changed"
_UNCHANGED = f"DELETE FROM changed WHERE ({_KEY}) NOT IN (SELECT {_KEY} FROM classes)"
_OLD_CLASSES = (
    f"DELETE FROM classes WHERE ({_KEY}) IN (SELECT {_KEY} FROM classes LEFT JOIN changed USING ({_KEY})"
    " ORDER BY turn DESC LIMIT -1 OFFSET ?)"
)
_OLD_EPOCHS = (
    "DELETE FROM classes WHERE method = ? AND setting = ? AND owner = ? AND terms = ? AND epoch IN (SELECT epoch FROM classes"
    f" LEFT JOIN changed USING ({_KEY}) WHERE method = ? AND setting = ? AND owner = ? AND terms = ? ORDER BY turn DESC"
    " LIMIT -1 OFFSET ?)"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS classes (epoch TEXT NOT NULL, method TEXT NOT NULL, setting TEXT NOT NULL, owner TEXT NOT NULL,"
    " terms TEXT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (epoch, method, setting, owner, terms)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS changed (epoch TEXT NOT NULL, method TEXT NOT NULL, setting TEXT NOT NULL, owner TEXT NOT NULL,"
    " terms TEXT NOT NULL, turn INTEGER NOT NULL UNIQUE, PRIMARY KEY (epoch, method, setting, owner, terms)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS drawn (id TEXT PRIMARY KEY, process TEXT NOT NULL, epoch TEXT NOT NULL, method TEXT NOT NULL,"
    " setting TEXT NOT NULL, owner TEXT NOT NULL, terms TEXT NOT NULL, round TEXT NOT NULL, served INTEGER NOT NULL,"
    " opened INTEGER NOT NULL, warned INTEGER NOT NULL, risk REAL NOT NULL, time REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS made (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE)",
)


class DiskLedger:
    """A `Ledger`. Open it after the store of the folder, which takes no folder with foreign files.

    terms  what evidence is collected under (`terms.fingerprint`): that of other terms is kept apart

    Raises: StoreError if the folder cannot be used.
    """

    def __init__(self, folder: str | Path, terms: str) -> None:
        self._terms = terms
        self._cold_starts = 0
        self._number = 0
        self._known: dict[ClassKey, State | None] = {}
        self._seen: object = None
        self._writes = 0
        self._process = ""
        self._in_use: InUse | None = None
        self._lock = forks.lock(forks.LEDGER)
        try:
            self._folder = Directory.open(Path(folder))
        except OSError as error:
            raise StoreError(f"{folder} cannot keep evidence ({error}): give a folder you may write to") from error
        try:
            self._connection = self._open()
            self._using(lambda connection: None)
        except BaseException:
            self._folder.close()
            raise

    @property
    def cold_starts(self) -> int:
        return self._cold_starts

    def read(self, cls: ClassKey) -> State | None:
        def reading(connection: sqlite3.Connection) -> State | None:
            seen = (self._number, self._connection.openings, connection.execute("PRAGMA data_version").fetchone()[0])
            if seen != self._seen:
                self._known, self._seen = {}, seen
            if cls not in self._known:
                self._known[cls] = self._row(connection, cls)
            return self._known[cls]

        return self._using(reading)

    def change(self, cls: ClassKey, change: Change, *, once: str = "") -> State:
        def changing(connection: sqlite3.Connection) -> State:
            connection.execute("BEGIN IMMEDIATE")
            try:
                known = self._row(connection, cls)
                state = known or State()
                if not once or self._is_new(connection, once):
                    state = change(state)
                    key = (*cls, self._terms)
                    connection.execute("REPLACE INTO classes VALUES (?, ?, ?, ?, ?, ?)", (*key, encoded(state)))
                    connection.execute(_TURN, key)
                    if known is None and self._forget_old(connection, key):
                        self._known.clear()
                connection.execute("DELETE FROM drawn WHERE id = ?", (once,))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._known[cls] = state
            self._writes += 1
            if self._writes % _WRITES_PER_CHECKPOINT == 0:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            return state

        return self._using(changing)

    def note(self, draw: Draw) -> None:
        time = float(draw.features.get(TIME_SHARE, 0.0))
        values = (draw.round, draw.served, draw.opened, draw.warned, draw.risk, time)

        def noting(connection: sqlite3.Connection) -> None:
            row = (draw.id, self._named(), *draw.cls, self._terms, *values)
            connection.execute("INSERT OR IGNORE INTO drawn VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

        self._writing(noting)

    def drop(self, id: str) -> None:
        self._using(lambda connection: connection.execute("DELETE FROM drawn WHERE id = ?", (id,)))

    def missing(self) -> list[Draw]:
        def ended(connection: sqlite3.Connection) -> list[Draw]:
            processes = [process for (process,) in connection.execute("SELECT DISTINCT process FROM drawn")]
            gone = {process for process in processes if process != self._process and not self._lives(process)}
            query = f"SELECT process, id, {_KEY}, round, served, opened, warned, risk, time FROM drawn WHERE terms = ?"
            rows = connection.execute(query, (self._terms,)).fetchall()
            return [draw for row in rows if row[0] in gone and (draw := _draw_of(row[1:])) is not None]

        return self._writing(ended)

    def classes(self, group: str | None = None) -> Iterator[tuple[ClassKey, State]]:
        query = "SELECT epoch, method, setting, owner, state FROM classes WHERE terms = ? AND (? IS NULL OR owner = ?)"
        rows = self._using(lambda connection: connection.execute(query, (self._terms, group, group)).fetchall())
        states = [(ClassKey(*row[:4]), decoded(row[4])) for row in rows]
        return iter([(cls, state) for cls, state in states if state is not None])

    def forget(self, group: str) -> None:
        for table in ("classes", "drawn"):
            query = f"DELETE FROM {table} WHERE owner = ?"
            self._using(lambda connection, query=query: connection.execute(query, (group,)))
        self._known.clear()

    def every(self) -> list[tuple[ClassKey, str, State]]:
        """All that is kept, under whatever terms: class, terms and state, the one changed last first."""
        query = f"SELECT {_KEY}, state FROM classes LEFT JOIN changed USING ({_KEY}) ORDER BY turn DESC"
        rows = self._using(lambda connection: connection.execute(query).fetchall())
        found = [(ClassKey(*row[:4]), str(row[4]), decoded(row[5])) for row in rows]
        return [(cls, terms, state) for cls, terms, state in found if state is not None]

    def remove(self, epoch: str | None) -> int:
        """Removes what is kept of a model under any terms, or of all; how many classes that were. Raises: StoreError."""
        query = "DELETE FROM classes WHERE ? IS NULL OR epoch = ?"
        removed = self._using(lambda connection: connection.execute(query, (epoch, epoch)).rowcount)
        self._using(lambda connection: connection.execute(_UNCHANGED))
        self._using(
            lambda connection: connection.execute("DELETE FROM drawn WHERE ? IS NULL OR epoch = ?", (epoch, epoch))
        )
        self._known.clear()
        return removed

    def close(self) -> None:
        self._connection.close()
        if self._in_use is not None and not self._in_use.left:
            self._folder.remove(names.evidence_lock(self._process))
            self._in_use.close()
        self._folder.close()

    def _named(self) -> str:
        """The name of this process, of which it keeps a file locked. Call it in a transaction, so that no other takes it for one that
        has ended."""
        if self._in_use is None or self._in_use.left:
            self._process = secrets.token_hex(8)
            name = names.evidence_lock(self._process)
            os.close(self._folder.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._in_use = InUse(self._folder, name)
        return self._process

    def _lives(self, process: str) -> bool:
        name = names.evidence_lock(process)
        if not names.is_evidence(name):
            return False
        try:
            lock = InUse(self._folder, name)
        except OSError:
            return False
        try:
            if not lock.alone():
                return True
            self._folder.remove(name)
            return False
        finally:
            lock.close()

    @staticmethod
    def _forget_old(connection: sqlite3.Connection, key: tuple[str, ...]) -> bool:
        """Keeps the bounds as a class is added: removes models that were served longest ago, and then classes. True if any left."""
        gone = connection.execute(_OLD_EPOCHS, (*key[1:], *key[1:], MOST_EPOCHS)).rowcount
        gone += connection.execute(_OLD_CLASSES, (MOST_CLASSES,)).rowcount
        connection.execute(_UNCHANGED)
        return gone > 0

    def _row(self, connection: sqlite3.Connection, cls: ClassKey) -> State | None:
        found = connection.execute(f"SELECT state FROM classes WHERE {_WHERE}", (*cls, self._terms)).fetchone()
        if found is None:
            return None
        state = decoded(found[0])
        if state is None:
            self._cold(f"what {self._file} says of {cls.method}, {cls.setting} is damaged: evidence is collected anew")
            connection.execute(f"DELETE FROM classes WHERE {_WHERE}", (*cls, self._terms))
        return state

    def _is_new(self, connection: sqlite3.Connection, name: str) -> bool:
        """Whether no change of that name was made; it is from now on."""
        if not connection.execute("INSERT OR IGNORE INTO made (name) VALUES (?)", (name,)).rowcount:
            return False
        connection.execute("DELETE FROM made WHERE number <= (SELECT max(number) FROM made) - ?", (REMEMBERED,))
        return True

    def _writing(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Does it in a transaction that no other process comes between."""

        def writing(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        return self._using(writing)

    def _using(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Does it with the connection, and again with the next file where this one is damaged. Processes open a file one at a time."""
        with self._lock:
            while True:
                fresh = self._connection.openings == 0
                try:
                    with entrance(self._folder.path) if fresh else nullcontext(), self._connection.use() as connection:
                        if self._connection.openings != self._prepared:
                            _prepare(connection)
                            self._prepared = self._connection.openings
                        return work(connection)
                except (OSError, sqlite3.Error) as error:
                    if isinstance(error, OSError) or not is_damage(error):
                        raise StoreError(
                            f"evidence in {self._file} cannot be read or written ({error}): see that its disk has space and "
                            "that no other program keeps it locked"
                        ) from error
                    self._cold(
                        f"{self._file} is damaged or not ours ({error}): it is left alone and the next file is used"
                    )
                    self._connection.close()
                    self._number += 1
                    self._connection = self._open()

    def _cold(self, cause: str) -> None:
        self._cold_starts += 1
        logger.warning("%s", cause)

    @property
    def _file(self) -> Path:
        return self._folder.path / names.evidence(self._number)

    def _open(self) -> Connection:
        if self._number >= FILES:
            raise StoreError(
                f"all {FILES} files of evidence in {self._folder.path} are damaged: remove them while no process uses the folder"
            )
        self._prepared = -1
        return Connection(self._file, _WAIT_SECONDS, admit=self._admit, noted_damage=lambda: None)

    def _admit(self) -> None:
        """Creates the file if it is missing, and refuses one that others may change. No descriptor of it is opened but SQLite's:
        see `store.connection`."""
        name = names.evidence(self._number)
        if self._folder.status(name) is None:
            connect(self._file, "rwc").close()
            os.chmod(name, 0o600, dir_fd=self._folder.descriptor)
        for part in (name, f"{name}-wal", f"{name}-shm"):
            status = self._folder.status(part)
            if status is not None and not is_our_file(status):
                raise Damaged(f"{part} is not a file that only you may change")
        with closing(connect(self._file, "ro", _WAIT_SECONDS)) as connection:
            _check_ours(connection)  # before a setting of ours changes another program's file


def _check_ours(connection: sqlite3.Connection) -> None:
    """Raises: Damaged for a file of another program or version; an empty one is ours."""
    connection.execute("BEGIN")  # or another process might prepare it between two of these
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if (application, version) != (APPLICATION, VERSION) and (application or version or tables):
        raise Damaged(f"it is of application {application:#x}, version {version}")


def _prepare(connection: sqlite3.Connection) -> None:
    """Creates the tables of a new file. Raises: Damaged for one whose pages are broken."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if (found := connection.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise Damaged(found)
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _draw_of(row: tuple[Any, ...]) -> Draw | None:
    """A noted draw; None for a damaged one."""
    id, *key, _terms, round, served, opened, warned, risk, time = row
    numbers, texts = (served, opened, warned, risk, time), (id, *key, round)
    texts_sound = all(isinstance(text, str) and not _SURROGATE.search(text) for text in texts)
    if not texts_sound or not all(type(number) in (int, float) and number >= 0 for number in numbers) or risk > 1:
        return None
    rule = opened - 1 if opened else None
    features = {TIME_SHARE: time}
    return Draw(bool(served), True, 0.0, rule, "", ClassKey(*key), risk, features, id, round, warned=bool(warned))


def open_ledger(folder: str | None, settings: TrustSettings) -> Ledger:
    """Evidence in a cache folder, or in memory without one. Raises: StoreError if the folder cannot be used."""
    return MemoryLedger() if folder is None else DiskLedger(folder, fingerprint(settings))
