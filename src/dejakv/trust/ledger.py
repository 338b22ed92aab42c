"""Ledger of evidence: a SQLite file in a cache folder that several processes share, or memory.

A draw that is to be labelled is written down before its label is awaited, under the name of its
process, which holds a lock on a file of that name. A later process thereby notices the labels that
an ended one never told. A label is one `BEGIN IMMEDIATE` transaction that takes its draw out, so
that none is counted twice and none overwrites another.

An operation that cannot read or write raises StoreError, and the gate stays closed while that
lasts. Rows are stored with their digests.
"""

import hashlib
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from dejakv.errors import StoreError
from dejakv.store.claim import InUse, is_our_file, locked_folder, open_file
from dejakv.store.connection import CatalogConnection
from dejakv.trust.draw import ClassKey, HitDraw
from dejakv.trust.evidence import ClassEvidence, HitCounts, LabelTally

T = TypeVar("T")

FILE = "trust.sqlite"
"""Name of the ledger in a cache folder."""

APPLICATION, VERSION = 0x444B5654, 3
"""SQLite's `application_id` ("DKVT") and `user_version` of our files.

Evidence of earlier versions begins anew.
"""

MAX_CLASSES = 10_000
"""Maximum classes with evidence.

The class that changed longest ago is removed first, and would begin anew.
"""

_WAIT_SECONDS = 1.0
_KEY = "epoch, method, setting, owner, terms"
_IS_KEY = "epoch = ? AND method = ? AND setting = ? AND owner = ? AND terms = ?"
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS classes (epoch TEXT, method TEXT, setting TEXT, "
    "owner TEXT, terms TEXT, turn INTEGER NOT NULL,"
    f" state TEXT NOT NULL, PRIMARY KEY ({_KEY})) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS turns ON classes (turn)",
    "CREATE TABLE IF NOT EXISTS drawn (id TEXT PRIMARY KEY, process TEXT NOT "
    "NULL, epoch TEXT NOT NULL, terms TEXT NOT NULL,"
    " draw TEXT NOT NULL) WITHOUT ROWID",
)
_NOTED = ("cls", "risk", "time", "served", "round", "opened", "warned")
"""Fields of a draw that are stored until its label is told."""
_DROP = "DELETE FROM drawn WHERE id = ?"
_PUT = (
    "REPLACE INTO classes VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(turn), "
    "0) + 1 FROM classes), ?)"
)
_OLD_CLASSES = (
    "DELETE FROM classes WHERE turn IN (SELECT turn FROM classes "
    "ORDER BY turn DESC LIMIT -1 OFFSET ?)"
)


class EvidenceLedger:
    """Storage of the `ClassEvidence` of each class.

    Thread-safe, shared by processes, and usable on both sides of a fork. Methods raise StoreError
    while the file cannot be read or written, and then nothing has changed.

    Parameters
    ----------
    folder : str or Path, optional
        Cache folder. With None the evidence is in memory and ends with this object.
    terms : str
        Terms under which evidence is collected (`evidence.fingerprint`). Other terms have evidence
        of their own.

    Raises
    ------
    StoreError
        If `folder` is no folder.

    Examples
    --------
    >>> ledger = EvidenceLedger()
    >>> draw = HitDraw(ClassKey("model", "blend", "default", "group"), risk=0.5, id="1")
    >>> ledger.note(draw)
    >>> explored = lambda state: state.counted(HitCounts(explored=1))
    >>> ledger.change(draw.cls, explored, labelled_draw=draw).counts.explored
    1
    >>> ledger.change(draw.cls, explored, labelled_draw=draw).counts.explored
    1
    """

    def __init__(self, folder: str | Path | None = None, terms: str = "") -> None:
        self._terms = terms
        self._folder = None if folder is None else Path(folder).resolve()
        self.path = None if self._folder is None else self._folder / FILE
        self._connection = CatalogConnection(
            self.path, _WAIT_SECONDS, admit=self._admit, prepare=_prepare
        )
        self.lock = self._connection.lock
        """Held during each operation; also the gate's, so that a fork interrupts neither."""
        # `_sign` is the lock on the file of that name, taken by the process `_pid`. A child of fork
        # has no lock, and takes another name.
        self._process = ""
        self._sign: InUse | None = None
        self._pid = 0
        if self._folder is not None and not self._folder.is_dir():
            raise StoreError(
                f"{folder} cannot keep evidence: it is no folder; give one that you may write to"
            )

    def read(self, cls: ClassKey) -> ClassEvidence | None:
        """Return the state of a class; None for an unknown one."""
        return self._run(lambda connection: self._row(connection, cls))

    def change(
        self,
        cls: ClassKey,
        change: Callable[[ClassEvidence], ClassEvidence],
        *,
        labelled_draw: HitDraw | None = None,
    ) -> ClassEvidence:
        """Apply a change to a class and return the result.

        Parameters
        ----------
        change : Callable[[ClassEvidence], ClassEvidence]
            Function from the present state to the new one.
        labelled_draw : HitDraw, optional
            Noted draw whose label this is. If it is no longer noted, its label was counted or
            dropped, and the state stays as it is.
        """

        def changing(connection: sqlite3.Connection) -> ClassEvidence:
            stored_state = self._row(connection, cls)
            state = stored_state or ClassEvidence()
            # Taken out and counted in one transaction: no label counts twice.
            if labelled_draw is None or connection.execute(_DROP, (labelled_draw.id,)).rowcount:
                state = change(state)
                connection.execute(_PUT, (*cls, self._terms, _sealed(asdict(state))))
                # Only a new class can be one too many.
                if stored_state is None:
                    connection.execute(_OLD_CLASSES, (MAX_CLASSES,))
            return state

        return self._run_in_transaction(changing)

    def note(self, draw: HitDraw) -> None:
        """Write down a draw that is to be labelled, until its label is counted or dropped."""
        text = _sealed({name: getattr(draw, name) for name in _NOTED})

        def noting(connection: sqlite3.Connection) -> None:
            row = (draw.id, self._process_name(), draw.cls.epoch, self._terms, text)
            connection.execute("INSERT OR IGNORE INTO drawn VALUES (?, ?, ?, ?, ?)", row)

        self._run_in_transaction(noting)

    def drop(self, id: str) -> None:
        """Forget a draw that gets no label."""
        self._run_in_transaction(lambda connection: connection.execute(_DROP, (id,)))

    def abandoned_draws(self) -> list[HitDraw]:
        """Return the draws noted, under these terms, by processes that ended without their labels.

        Lock files of such processes are removed.
        """

        def ended(connection: sqlite3.Connection) -> list[HitDraw]:
            processes = [
                process for (process,) in connection.execute("SELECT DISTINCT process FROM drawn")
            ]
            ended_processes = {process for process in processes if not self._is_running(process)}

            query = "SELECT process, id, draw FROM drawn WHERE terms = ?"
            rows = connection.execute(query, (self._terms,)).fetchall()
            return [_draw_of(id, text) for process, id, text in rows if process in ended_processes]

        return self._run_in_transaction(ended)

    def classes(
        self, group: str | None = None, *, any_terms: bool = False
    ) -> list[tuple[ClassKey, ClassEvidence, str]]:
        """Return every class, or those of one group, with state and terms, the latest change first.

        Parameters
        ----------
        group : str, optional
            Group of the classes. None takes all.
        any_terms : bool
            Whether classes under other terms are listed too.
        """
        query = (
            "SELECT epoch, method, setting, owner, state, terms FROM classes "
            "WHERE (?1 IS NULL OR owner = ?1)"
            " AND (?2 IS NULL OR terms = ?2) ORDER BY turn DESC"
        )

        terms = None if any_terms else self._terms

        def listing(connection: sqlite3.Connection) -> list[tuple[ClassKey, ClassEvidence, str]]:
            rows = connection.execute(query, (group, terms)).fetchall()
            return [(ClassKey(*row[:4]), _state_of(row[4]), row[5]) for row in rows]

        return self._run(listing)

    def remove(self, *, epoch: str | None = None) -> int:
        """Remove the evidence and noted draws of a model, or all, under any terms.

        Parameters
        ----------
        epoch : str, optional
            Epoch of the model. None for all models.

        Returns
        -------
        int
            Number of removed classes.
        """

        def removing(connection: sqlite3.Connection) -> int:
            condition = "(?1 IS NULL OR epoch = ?1)"
            connection.execute(f"DELETE FROM drawn WHERE {condition}", (epoch,))
            return connection.execute(f"DELETE FROM classes WHERE {condition}", (epoch,)).rowcount

        return self._run_in_transaction(removing)

    def close(self) -> None:
        """Close the file for good."""
        with self.lock:
            self._connection.close()
            if self._folder is not None and self._sign is not None and self._pid == os.getpid():
                (self._folder / _lock_name(self._process)).unlink(missing_ok=True)
                self._sign.close()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._connection.use() as connection:
                return work(connection)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"evidence in {self.path or 'memory'} cannot be read or written "
                f"({error}): see that its disk has space and that no other program keeps it "
                "locked; if it is damaged or not DejaKV's, stop the processes that use the folder "
                "and remove the file"
            ) from error

    def _run_in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a write transaction (`BEGIN IMMEDIATE`) and return its result.

        Other processes can read meanwhile, but not write. An error of `work` rolls back.

        Raises
        ------
        StoreError
            If the file cannot be read or written.
        """

        def writing(connection: sqlite3.Connection) -> T:
            with _transaction(connection):
                return work(connection)

        return self._run(writing)

    def _admit(self) -> None:
        """Create the file if it is missing.

        Raises
        ------
        OSError
            If the file cannot be created.
        sqlite3.Error
            For a file that others may change.
        """
        if self._folder is None or self.path is None:
            return
        # One process at a time: nobody opens the file between its creation and its check.
        with locked_folder(self._folder):
            # Only SQLite opens a file that exists: closing it here would drop SQLite's locks.
            with suppress(FileExistsError):
                os.close(
                    os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                )
            if not is_our_file(self.path.lstat()):
                raise sqlite3.DatabaseError("it is not a file that only you may change")

    def _row(self, connection: sqlite3.Connection, cls: ClassKey) -> ClassEvidence | None:
        row = connection.execute(
            f"SELECT state FROM classes WHERE {_IS_KEY}", (*cls, self._terms)
        ).fetchone()
        return None if row is None else _state_of(row[0])

    def _process_name(self) -> str:
        """Return the name of this process.

        It must be called in a transaction, so that no other process reads the name before its lock
        is taken.
        """
        if self._folder is not None and (self._sign is None or self._pid != os.getpid()):
            # A child of fork closes its copy, and its parent keeps the lock.
            if self._sign is not None:
                self._sign.close()
            self._process, self._pid = secrets.token_hex(8), os.getpid()

            file = self._folder / _lock_name(self._process)
            os.close(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._sign = InUse(file)
        return self._process

    def _is_running(self, process: str) -> bool:
        if self._folder is None:
            return process == self._process
        # The name comes from the file, and becomes part of a path.
        if not re.fullmatch("[0-9a-f]{16}", process):
            return False

        file = self._folder / _lock_name(process)
        try:
            sign = InUse(file)
        except OSError:
            return False

        # A process that lives holds the lock of its file, and the kernel frees that of a dead one.
        ended = sign.try_lock_exclusive()
        sign.close()
        if ended:
            file.unlink(missing_ok=True)
        return not ended


def _lock_name(process: str) -> str:
    return f"trust-{process}.lock"


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _prepare(connection: sqlite3.Connection) -> None:
    """Check a file and create its tables.

    Raises
    ------
    sqlite3.Error
        For a file of another program or version, and for a broken one.
    """
    with _transaction(connection):
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]

        # What labels meant has changed since, so earlier evidence would not hold.
        if application == APPLICATION and 0 < version < VERSION:
            for name in ("classes", "changed", "drawn", "made"):
                connection.execute(f"DROP TABLE IF EXISTS {name}")
        elif (application, version) != (APPLICATION, VERSION) and (
            application or version or tables
        ):
            raise sqlite3.DatabaseError(f"it is of application {application:#x}, version {version}")
        if (check_result := connection.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(check_result)

        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    # Outside of the transaction, in which SQLite refuses to change it.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _sealed(values: dict[str, Any]) -> str:
    """Return JSON behind its digest."""
    text = json.dumps(values, allow_nan=False)
    return _digest(text) + text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _unsealed(row: object) -> dict[str, Any]:
    """Check a row's digest and return its values.

    Raises
    ------
    sqlite3.DatabaseError
        For a changed row.
    """
    text = row[16:] if isinstance(row, str) else ""
    if not isinstance(row, str) or _digest(text) != row[:16]:
        raise sqlite3.DatabaseError("a row differs from what was written")
    return json.loads(text)


def _state_of(row: object) -> ClassEvidence:
    values = _unsealed(row)
    return ClassEvidence(
        round=values["round"],
        pilot=tuple(values["pilot"]),
        cutoffs=tuple(values["cutoffs"]),
        tallies=tuple(LabelTally(**tally) for tally in values["tallies"]),
        opened=values["opened"],
        drift=tuple(values["drift"]),
        counts=HitCounts(**values["counts"]),
    )


def _draw_of(id: str, row: object) -> HitDraw:
    values = _unsealed(row)
    values["cls"] = ClassKey(*values["cls"])
    return HitDraw(**values, labelled=True, id=id)
