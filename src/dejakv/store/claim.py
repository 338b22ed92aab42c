"""The folder of a store: what is in it, who may use it, and how it is deleted.

A folder with DejaKV's marker is a store. A folder that is missing, empty, or has stores of ranks
alone becomes one, and any other folder is refused. Other files in a store's folder are never opened
or removed, and no link in it is followed.

    <folder>/dejakv-store.json  the marker
    <folder>/catalog.sqlite     the index, with the descriptions of prompts
    <folder>/segments/ab/...    one safetensors file a segment
    <folder>/temporary/...      files that are being written
    <folder>/tp-0-of-2/...      separate stores, one for each tensor-parallel rank
    <folder>/trust.sqlite       evidence on approximate answers (`dejakv.trust.ledger`)
    <folder>/trust-....lock     locked by a process that waits for labels
"""

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dejakv.errors import StoreError

FORMAT = 3
"""Format of the whole folder. Formats 1 and 2 had a file for each prompt, or for shared rows."""
MARKER = "dejakv-store.json"
"""Name of the file that makes a folder a store."""
CATALOG = "catalog.sqlite"
CATALOG_FILES = (CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm", f"{CATALOG}.damaged")
DAMAGED = CATALOG_FILES[-1]
"""Name of the file that says that the catalog must be rebuilt."""
SEGMENTS = "segments"
TEMPORARY = "temporary"
SEGMENT = re.compile(r"[0-9a-f]{32}\.safetensors")
"""Name of a segment's file."""
GROUP = re.compile(r"[0-9a-f]{2}")
"""Name of a folder below `segments`."""
NOT_FOR_OTHERS = 0o022
"""Mode bits that let others change a file."""
MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux lists the mounted file systems."""
NETWORKS = frozenset(
    "afs beegfs ceph cifs coda gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb2 smb3 "
    "smbfs wekafs"
    " fuse.blobfuse fuse.blobfuse2 fuse.ceph-fuse fuse.gcsfuse fuse.glusterfs fuse.goofys "
    "fuse.juicefs fuse.moosefs fuse.rclone"
    " fuse.s3fs fuse.seaweedfs fuse.sshfs".split()
)
"""Types of file systems that other machines may use, as Linux names them."""

_NEW_MARKER = f"{MARKER}.new"
_LOCK_SECONDS = 30.0
RANK = re.compile(r"tp-[0-9]+-of-[0-9]+")
"""Name of the folder of a tensor-parallel rank."""
_OUR_FILES = re.compile(
    r"segments/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors|temporary/[0-9a-f-]+\.safetensors"
    r"|catalog\.sqlite(-wal|-shm|\.damaged)?|dejakv-store\.json\.new"
    r"|trust(-[1-9])?\.sqlite(-wal|-shm|-journal)?|trust-[0-9a-f]{16}\.lock"
    r"|chunks/[0-9a-f]{2}/[0-9a-f]{32}-[0-9a-f]{8}\.safetensors"
    r"|quarantine/([0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors|catalog-catalog\.sqlite(-wal|-shm)?)"
)
"""What a purge of a folder deletes, also of the formats 1 and 2. The marker is deleted last."""
_OUR_FOLDERS = re.compile(r"(segments|chunks)(/[0-9a-f]{2})?|temporary|quarantine")


def file_of(segment: str) -> tuple[str, str]:
    """Return folder (below `segments`) and name of a segment's file."""
    return segment[:2], f"{segment}.safetensors"


def is_our_file(status: os.stat_result) -> bool:
    """Return whether a status is that of a plain file of this user that nobody else may change."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & NOT_FOR_OTHERS
    )


def open_file(path: str | Path, flags: int) -> int:
    """Open a file and return its descriptor; a file that this creates has mode 0600.

    A path that is a link is refused, and no other end of a pipe is waited for.

    Raises
    ------
    OSError
        If it cannot be opened, or is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def ensure_folder(path: Path) -> Path:
    """Make a folder if it is missing, with mode 0700, and return its path.

    Raises
    ------
    StoreError
        For a link, a file, or another user's folder.
    OSError
        If it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(0o700)
    # `lstat`, after the attempt to make it: a link made meanwhile is seen, and not followed.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StoreError(
            f"{path} is a link or another user's, and is not followed: remove it, or give another "
            "folder"
        )

    return path


def refuse_network(folder: Path) -> None:
    """Refuse a folder on a file system that other machines may use. It need not exist.

    Raises
    ------
    StoreError
        For such a folder.
    """
    kind = filesystem_type(folder)
    if kind in NETWORKS:
        raise StoreError(
            f"{folder} is on a network file system ({kind}), where a store's catalog is not safe: "
            "give a folder on a disk of this"
            " machine"
        )


def filesystem_type(folder: Path) -> str:
    """Return the type of a folder's file system, as the kernel names it; empty if unknown.

    The folder need not exist.
    """
    try:
        path = folder.resolve()
        # The folder may not exist yet: then the nearest existing one above decides.
        device = (
            next(ancestor for ancestor in (path, *path.parents) if ancestor.exists()).stat().st_dev
        )
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except (OSError, RuntimeError):
        return ""

    for line in lines:
        # proc(5): optional fields end with a lone hyphen; the type comes first behind it.
        before, _, after = line.partition(" - ")
        if after and before.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
            return after.split()[0]

    return ""


@contextmanager
def locked_folder(folder: Path, *, make: bool = False) -> Generator[Path]:
    """Lock a folder of this user: processes open or purge it one at a time.

    Parameters
    ----------
    folder : Path
        The folder.
    make : bool
        Create it if it is missing.

    Yields
    ------
    Path
        Its real path.

    Raises
    ------
    StoreError
        If it belongs to another user, or another process keeps it locked for 30 s.
    OSError
        If it cannot be made or opened.
    """
    # The lock is on the folder itself, so that it needs no file and leaves none.
    descriptor, path = _lock_folder(folder, make)
    try:
        yield path
    finally:
        # Explicitly: a child forked meanwhile would keep the lock of a descriptor that is only
        # closed.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def format_of(path: Path) -> int | None:
    """Return the format of the store in a folder; None if the folder may become a store.

    Call it inside `locked_folder`.

    Raises
    ------
    StoreError
        For a folder with other files and no marker, and for a marker that is a link, unreadable,
        damaged, not this user's, or of a newer format.
    OSError
        If the folder cannot be read.
    """
    try:
        descriptor = open_file(path / MARKER, os.O_RDONLY)
    except FileNotFoundError:
        strange = [
            name for name in os.listdir(path) if name != _NEW_MARKER and not _is_store(path / name)
        ]
        if strange:
            raise StoreError(
                f"{path} holds other files ({strange[0]}) and no {MARKER}, so it is not a cache of "
                "DejaKV and is left alone: give a "
                "new or empty folder for the cache"
            ) from None

        return None
    except OSError as error:
        raise StoreError(
            f"{path / MARKER} is a link or cannot be read ({error.strerror}): give another folder"
        ) from error

    try:
        ours, raw = is_our_file(os.fstat(descriptor)), os.read(descriptor, 4096)
    finally:
        os.close(descriptor)

    if not ours:
        raise StoreError(
            f"{path / MARKER} is not a file that only you may change, so somebody else may have "
            "made this cache: give another folder"
        )

    try:
        marker: Any = json.loads(raw)
    except (ValueError, RecursionError):
        marker = None

    match marker:
        case {"format": int(number)} if number > FORMAT:
            raise StoreError(
                f"the store in {path} has format {number}, made by a newer DejaKV; this one knows "
                f"{FORMAT}: update DejaKV, or give "
                "another folder"
            )
        case {"format": int(number)} if number > 0:
            return number
        case _:
            raise StoreError(
                f'{path / MARKER} is damaged: write {{"format": {FORMAT}}} into it if the folder '
                f"has {SEGMENTS}/, or give another folder"
            )


def bucket_copied_in(path: Path) -> str:
    """Return the address of the bucket whose copies a folder has; empty for a store of its own.

    Raises
    ------
    OSError
        If the marker cannot be read.
    """
    return str(json.loads((path / MARKER).read_bytes()).get("copies of", ""))


def write_marker(path: Path, original: str = "") -> None:
    """Make a folder a store, or the place of a bucket's copies.

    Call it inside `locked_folder`.

    Parameters
    ----------
    path : Path
        The folder.
    original : str
        Address of the bucket whose copies the folder has; empty for a store.

    Raises
    ------
    OSError
        If the marker cannot be written.
    """
    new = path / _NEW_MARKER
    # A process that was killed here has left it.
    new.unlink(missing_ok=True)
    descriptor = open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        marker_fields = {"format": FORMAT} | ({"copies of": original} if original else {})
        os.write(descriptor, json.dumps(marker_fields).encode() + b"\n")
        # Before the rename: after a power cut the marker is whole or not there.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

    new.rename(path / MARKER)


class InUse:
    """A shared lock on a file, until it is closed.

    On the marker of a store it says that nobody may delete or repair the store meanwhile. Children
    of `fork` have the lock too.

    Raises
    ------
    BlockingIOError
        While another process deletes or repairs the store.
    OSError
        If the file cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = open_file(file, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def try_lock_exclusive(self) -> bool:
        """Lock the file alone; False if another process has a lock on it.

        After True no other process can lock it until `lock_shared`.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A failed attempt to change a lock may lose it.
            self.lock_shared()
            return False

        return True

    def lock_shared(self) -> None:
        """Let other processes lock the file too."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._descriptor)


def ranks_in(path: Path) -> list[Path]:
    """List the folders of tensor-parallel ranks in a folder."""
    return [
        path / name
        for name in sorted(os.listdir(path))
        if RANK.fullmatch(name) and not (path / name).is_symlink()
    ]


def purge_folder(folder: str | Path) -> int:
    """Delete the store in a folder, and those of tensor-parallel ranks below it.

    Other files stay. The folder itself is removed if it is empty then.

    Returns
    -------
    int
        Number of removed files; 0 for a missing or an empty folder, which stays as it is.

    Raises
    ------
    StoreError
        If the folder is not a DejaKV store, another process uses it, or it cannot be deleted.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            return 0
        with locked_folder(folder) as path:
            # Ranks may have stores below a folder that is not a store itself.
            removed = (_delete if format_of(path) is not None else _delete_ranks)(path)
            if removed and not os.listdir(path):
                # A link given by the user stays, and leads nowhere then.
                path.rmdir()
            return removed
    except OSError as error:
        raise StoreError(
            f"the store in {folder} cannot be deleted ({error}): check its permissions"
        ) from error


def _delete(path: Path) -> int:
    in_use = InUse(path / MARKER)
    try:
        if not in_use.try_lock_exclusive():
            raise StoreError(
                f"the store in {path} is in use: close it in every process before it is deleted"
            )
        removed = _delete_ranks(path)
        # By descriptors: a folder replaced by a link meanwhile leads nowhere.
        for inside, _, files, descriptor in os.fwalk(path, topdown=False):
            ours = [
                file
                for file in files
                if _OUR_FILES.fullmatch(os.path.relpath(f"{inside}/{file}", path))
            ]
            for file in ours:
                os.unlink(file, dir_fd=descriptor)
            removed += len(ours)
            if _OUR_FOLDERS.fullmatch(os.path.relpath(inside, path)):
                # It stays if other files are in it.
                with suppress(OSError):
                    os.rmdir(inside)

        # Last: until then a purge that was killed can be repeated.
        os.unlink(path / MARKER)
        return removed + 1
    finally:
        in_use.close()


def _delete_ranks(path: Path) -> int:
    removed = 0
    for below in ranks_in(path):
        with locked_folder(below) as rank:
            removed += _delete(rank) if format_of(rank) is not None else 0
        with suppress(OSError):
            below.rmdir()
    return removed


def _is_store(path: Path) -> bool:
    return not path.is_symlink() and (path / MARKER).is_file()


def _lock_folder(folder: Path, make: bool) -> tuple[int, Path]:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder.resolve(strict=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise StoreError(
                    f"{folder} belongs to another user: stored state reveals prompts, so give a "
                    "folder of your own"
                )

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock is of no use on a folder that was purged since it was opened.
            if path.exists() and os.path.samestat(path.lstat(), os.fstat(descriptor)):
                return descriptor, path
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StoreError(
                    f"another process has kept {path} locked for {_LOCK_SECONDS:.0f} s: end it, or "
                    "try again"
                ) from error

            # `flock` has no timeout of its own.
            time.sleep(0.005)
        except BaseException:
            os.close(descriptor)
            raise

        os.close(descriptor)
