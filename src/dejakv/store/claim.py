"""Decides which folders are stores, and which may become one, and deletes stores. Nothing is opened, swept or removed in any other folder.

A folder is a store if it has DejaKV's marker, or nothing but what a store has: then it gets one. An empty folder becomes a store. Any
other is refused.
"""

import fcntl
import json
import os
import re
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dejakv.errors import StoreError
from dejakv.store import names
from dejakv.store.catalog import TABLES
from dejakv.store.connection import connect
from dejakv.store.counters import logger
from dejakv.store.directory import Directory, is_our_file
from dejakv.store.names import MARKER, NEW_MARKER

MOUNTS = Path("/proc/self/mountinfo")
SHARED = frozenset(
    "afs autofs.nfs beegfs ceph cifs coda davfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs pvfs2 smb2 smb3 smbfs wekafs".split()
)
SHARED_BY_FUSE = frozenset(
    "blobfuse blobfuse2 ceph-fuse curlftpfs gcsfuse glusterfs goofys juicefs moosefs mfs rclone s3fs seaweedfs sshfs".split()
)
"""What stands behind `fuse.`."""


def refuse_network(folder: Path) -> None:
    """Raises: StoreError for a folder, there or not yet, on a file system that other machines may use too."""
    kind = kind_of(folder)
    if kind in SHARED or (kind.startswith("fuse.") and kind.removeprefix("fuse.") in SHARED_BY_FUSE):
        raise StoreError(
            f"{folder} is on a network file system ({kind}), where a store's catalog is not safe: give a folder on a disk of this"
            " machine"
        )


def kind_of(folder: Path) -> str:
    """The type of the file system on which the folder is, or will be, as the kernel calls it; empty where the system does not tell."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
        path = folder.resolve()
    except (OSError, RuntimeError):
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if path.is_relative_to(mounted) and len(mounted.parts) >= best:  # the latest of several in one place
            best, kind = len(mounted.parts), after.split()[0]
    return kind


FORMAT = 3
"""Of the whole folder. Formats 1 and 2 had a file for each prompt, or for what prompts shared."""
_FORMATS = (1, 2, FORMAT)
_MAX_BYTES = 4096
_TABLES_OF = {version: {"chunks", "totals", "removed"} for version in (1, 2)} | {FORMAT: TABLES}
_LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Marker:
    """Content of the marker."""

    id: str
    format: int = FORMAT


@contextmanager
def entrance(folder: Path, *, make: bool = False) -> Generator[Directory]:
    """A folder of this user, locked: processes open or purge it one at a time. `make`: create it if it is missing.

    Raises: StoreError if it belongs to another user or another process keeps it locked, OSError.
    """
    directory = _locked(folder, make)
    try:
        yield directory
    finally:
        # Explicitly: a child forked meanwhile would keep the lock of a descriptor that is only closed.
        fcntl.flock(directory.descriptor, fcntl.LOCK_UN)
        directory.close()


def identify(directory: Directory) -> Marker | None:
    """The marker of a store; an old store gets one. None for an empty folder. Call it inside `entrance`.

    Raises: StoreError for any other folder and for a store of a newer format, OSError.
    """
    marker = read_marker(directory)
    if marker is not None:
        return marker
    found = [name for name in directory.names() if name != names.NEW_MARKER and not _is_store_below(directory, name)]
    if not found:
        return None
    stranger = _stranger(directory, found)
    if stranger is None and _has_state(directory):
        logger.info("the store in %s had lost its marker", directory.path)
        return write_marker(directory, 2 if names.OLD_CHUNKS in found else FORMAT)
    raise StoreError(
        f"{directory.path} holds other files ({stranger or names.CATALOG}) and no {names.MARKER}, so it is not a cache of "
        "DejaKV and is left alone: give a new or empty folder for the cache"
    )


def _locked(folder: Path, make: bool) -> Directory:
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = Directory.open(folder)
        try:
            if os.fstat(directory.descriptor).st_uid != os.geteuid():
                raise StoreError(
                    f"{folder} belongs to another user: stored state reveals prompts, so give a folder of your own"
                )
            _lock(directory)
            if directory.is_in_place():
                return directory
        except BaseException:
            directory.close()
            raise
        directory.close()  # purged since it was opened


def _lock(directory: Directory) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has kept {directory.path} locked for {_LOCK_SECONDS:.0f} s: end it, or try again"
                ) from error
            time.sleep(0.005)


def _is_store_below(directory: Directory, name: str) -> bool:
    """Whether it is a separate store: tensor-parallel ranks have their stores below the one of a single rank."""
    with directory.inside(name) as below:
        return below is not None and any(is_our_file(below.status(file)) for file in (names.MARKER, names.CATALOG))


def _has_state(directory: Directory) -> bool:
    """Whether there is a catalog of ours: a database of that name alone may be anybody's."""
    if not is_our_file(directory.status(names.CATALOG)):
        return False
    # Without a log it is opened in a mode that creates no files beside it.
    log = directory.status(names.CATALOG_PARTS[1])
    mode = "ro" if log is not None and log.st_size else "ro&immutable=1"
    try:
        with closing(connect(directory.path / names.CATALOG, mode)) as sql:
            version = sql.execute("PRAGMA user_version").fetchone()[0]
            tables = {name for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        logger.warning("%s is not recognised as a catalog: %s", directory.path / names.CATALOG, error)
        return False
    return tables - {"sqlite_sequence"} == _TABLES_OF.get(version)


def _stranger(directory: Directory, found: list[str]) -> str | None:
    """A file there that no store has, if any."""
    files = {*names.CATALOG_PARTS, names.DAMAGED}
    for name in found:
        if name in files or names.is_evidence(name):
            if not is_our_file(directory.status(name)):
                return name
        elif name in (names.SEGMENTS, names.OLD_CHUNKS):
            with directory.inside(name) as chunks:
                groups = chunks.names() if chunks else [""]
                for group in groups:
                    with (chunks or directory).inside(group) as inner:
                        members = inner.names() if inner and names.is_group(group) else [""]
                    known = names.name_of if name == names.SEGMENTS else names.old_name_of
                    strange = [member for member in members if known(group, member) is None]
                    if strange:
                        return os.path.join(name, group, strange[0])
        elif name in (names.TEMPORARY, names.OLD_QUARANTINE):
            fits = names.is_temporary if name == names.TEMPORARY else names.is_old_set_aside
            with directory.inside(name) as inner:
                strange = [member for member in (inner.names() if inner else [""]) if not fits(member)]
            if strange:
                return os.path.join(name, strange[0])
        else:
            return name
    return None


def read_marker(directory: Directory) -> Marker | None:
    """The marker of a folder, or None if it has none.

    Raises: StoreError if it belongs to another user, is damaged, or has a format unknown to this version.
    """
    status = directory.status(MARKER)
    if status is None:
        return None
    if not is_our_file(status):
        raise StoreError(
            f"{directory.path / MARKER} is not a file that only you may change, so somebody else may have made this cache: "
            "give another folder"
        )
    descriptor = directory.open_file(MARKER, os.O_RDONLY)
    try:
        raw = os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
    try:
        said: Any = json.loads(raw)
    except (ValueError, RecursionError):
        said = None
    match said:
        case {"format": int(number), "id": str(id)} if number in _FORMATS:
            return Marker(id, number)
        case {"format": int(number)} if number > FORMAT:
            raise StoreError(
                f"the store in {directory.path} has format {number}, made by a newer DejaKV; this one knows {FORMAT}: "
                "update DejaKV, or give another folder"
            )
        case _:
            raise StoreError(
                f"{directory.path / MARKER} is damaged: remove this one file, so that the store is recognised by what is in it, "
                "or give another folder"
            )


def write_marker(directory: Directory, format: int = FORMAT) -> Marker:
    """Makes a folder a store. Call it while no other process can. Raises: OSError."""
    marker = Marker(secrets.token_hex(16), format)
    directory.remove(NEW_MARKER)  # left by a process killed here
    descriptor = directory.open_file(NEW_MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, _text(marker))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(NEW_MARKER, MARKER, src_dir_fd=directory.descriptor, dst_dir_fd=directory.descriptor)
    return marker


def _text(marker: Marker) -> bytes:
    return json.dumps(asdict(marker)).encode() + b"\n"


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


def purge_folder(folder: str | Path) -> int:
    """Deletes the store in a folder, including the stores of tensor-parallel ranks below it; returns the number of removed files.

    A missing or an empty folder is left as it is: 0. Other files in a store's folder are left too, and then also the
    folder; otherwise the folder itself is removed.
    Raises: StoreError if the folder is not a DejaKV store, another process uses it, or it cannot be deleted.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            return 0
        with entrance(folder) as directory:
            # Ranks may have stores below a folder that is not a store itself.
            removed = _purge_ranks(directory) if identify(directory) is None else _purge_alone(directory)
            if removed and not directory.names():
                # By its real path: a link given by the user stays, and then leads nowhere.
                os.rmdir(directory.path)
            return removed
    except OSError as error:
        raise StoreError(f"the store in {folder} cannot be deleted ({error}): check its permissions") from error


def _purge_alone(directory: Directory) -> int:
    in_use = InUse(directory)
    try:
        if not in_use.alone():
            raise StoreError(f"the store in {directory.path} is in use: close it in every process before it is deleted")
        return _purge(directory)
    finally:
        in_use.close()


def _purge(directory: Directory) -> int:
    removed = _purge_ranks(directory)
    for name, known in ((names.SEGMENTS, names.name_of), (names.OLD_CHUNKS, names.old_name_of)):
        with directory.inside(name) as groups:
            removed += _purge_groups(groups, known) if groups else 0
        directory.remove_directory(name)
    for name, fits in ((names.TEMPORARY, names.is_temporary), (names.OLD_QUARANTINE, names.is_old_set_aside)):
        with directory.inside(name) as files:
            removed += sum(files.remove(n) for n in files.names() if fits(n)) if files else 0
        directory.remove_directory(name)
    removed += sum(map(directory.remove, filter(names.is_evidence, directory.names())))
    # The marker is removed last: an interrupted purge leaves a store.
    for name in (*names.CATALOG_PARTS, names.DAMAGED, names.NEW_MARKER, names.MARKER):
        removed += directory.remove(name)
    return removed


def _purge_ranks(directory: Directory) -> int:
    return sum(_purge_rank(directory, name) for name in filter(names.is_rank, directory.names()))


def _purge_rank(directory: Directory, name: str) -> int:
    with directory.inside(name) as below:
        if below is None:
            return 0
        with entrance(below.path) as rank:
            removed = _purge_alone(rank) if identify(rank) is not None else 0
    directory.remove_directory(name)
    return removed


def _purge_groups(groups: Directory, known: Callable[[str, str], str | None]) -> int:
    removed = 0
    for group in filter(names.is_group, groups.names()):
        with groups.inside(group) as files:
            removed += sum(files.remove(n) for n in files.names() if known(group, n)) if files else 0
        groups.remove_directory(group)
    return removed


_all: weakref.WeakSet[InUse] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Closing the child's copy leaves the parent its lock.
    for sign in list(_all):
        sign.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
