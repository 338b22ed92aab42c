"""The folder of a store: what is in it, who may use it, and how it is deleted.

A folder with DejaKV's marker is a store. An empty or missing one becomes a store, and any other is refused. Other files in a store's folder
are never opened or removed, and no link in it is followed.

<folder>/dejakv-store.json  the marker
<folder>/catalog.sqlite     the index, with the descriptions of prompts
<folder>/segments/ab/...    one safetensors file a segment
<folder>/temporary/...      files that are being written
<folder>/tp-0-of-2/...      separate stores, one for each tensor-parallel rank
<folder>/trust.sqlite       evidence on approximate answers (`dejakv.trust.ledger`)
<folder>/trust-....lock     held by a process that waits for labels
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
"""Of the whole folder. Formats 1 and 2 had a file for each prompt, or for what prompts shared."""
MARKER = "dejakv-store.json"
CATALOG = "catalog.sqlite"
CATALOG_FILES = (CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm", f"{CATALOG}.damaged")
DAMAGED = CATALOG_FILES[-1]
SEGMENTS = "segments"
TEMPORARY = "temporary"
SEGMENT = re.compile(r"[0-9a-f]{32}\.safetensors")
"""Name of a segment's file."""
GROUP = re.compile(r"[0-9a-f]{2}")
"""Name of a folder below `segments`."""
NOT_FOR_OTHERS = 0o022
"""Mode bits that let others change a file."""
MOUNTS = Path("/proc/self/mountinfo")
NETWORKS = frozenset(
    "afs beegfs ceph cifs coda gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb2 smb3 smbfs wekafs"
    " fuse.blobfuse fuse.blobfuse2 fuse.ceph-fuse fuse.gcsfuse fuse.glusterfs fuse.goofys fuse.juicefs fuse.moosefs fuse.rclone"
    " fuse.s3fs fuse.seaweedfs fuse.sshfs".split()
)

_NEW_MARKER = f"{MARKER}.new"
_LOCK_SECONDS = 30.0
RANK = re.compile(r"tp-[0-9]+-of-[0-9]+")
_OUR_FILES = re.compile(
    r"segments/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors|temporary/[0-9a-f-]+\.safetensors"
    r"|catalog\.sqlite(-wal|-shm|\.damaged)?|dejakv-store\.json\.new"
    r"|trust(-[1-9])?\.sqlite(-wal|-shm|-journal)?|trust-[0-9a-f]{16}\.lock"
    r"|chunks/[0-9a-f]{2}/[0-9a-f]{32}-[0-9a-f]{8}\.safetensors"
    r"|quarantine/([0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors|catalog-catalog\.sqlite(-wal|-shm)?)"
)
"""What a purge of a folder deletes, also of the formats 1 and 2; the marker is deleted last."""
_OUR_FOLDERS = re.compile(r"(segments|chunks)(/[0-9a-f]{2})?|temporary|quarantine")


def file_of(segment: str) -> tuple[str, str]:
    """Folder below `segments` and name of a segment's file."""
    return segment[:2], f"{segment}.safetensors"


def is_our_file(status: os.stat_result) -> bool:
    """Whether it is a plain file that this user owns and nobody else may change."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & NOT_FOR_OTHERS


def open_file(path: str | Path, flags: int) -> int:
    """A descriptor of a file. Follows no link and waits for no other end of a pipe. Raises: OSError"""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def own_folder(path: Path) -> Path:
    """Makes a folder if it is missing. Raises: StoreError for a link or another user's, OSError."""
    with suppress(FileExistsError):
        path.mkdir(0o700)
    # `lstat`, after the attempt to make it: a link made meanwhile is seen, and not followed.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StoreError(f"{path} is a link or another user's, and is not followed: remove it, or give another folder")
    return path


def refuse_network(folder: Path) -> None:
    """Refuse a folder, existing or not, on a file system that other machines may use. Raises: StoreError"""
    kind = kind_of(folder)
    if kind in NETWORKS:
        raise StoreError(
            f"{folder} is on a network file system ({kind}), where a store's catalog is not safe: give a folder on a disk of this"
            " machine"
        )


def kind_of(folder: Path) -> str:
    """Type of the (future) folder's file system, as the kernel names it; empty if unknown."""
    try:
        path = folder.resolve()
        # The folder may not exist yet: then the nearest existing one above decides.
        device = next(ancestor for ancestor in (path, *path.parents) if ancestor.exists()).stat().st_dev
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
def entrance(folder: Path, *, make: bool = False) -> Generator[Path]:
    """The real path of a folder of this user, locked: processes open or purge it one at a time. `make`: create it if it is missing.

    Raises: StoreError if it belongs to another user or another process keeps it locked, OSError.
    """
    # The lock is on the folder itself, so that it needs no file and leaves none.
    descriptor, path = _locked(folder, make)
    try:
        yield path
    finally:
        # Explicitly: a child forked meanwhile would keep the lock of a descriptor that is only closed.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def format_of(path: Path) -> int | None:
    """The format of the store in a folder; None for one that may become a store. Call it inside `entrance`.

    Raises: StoreError for any other folder, and for a marker that is damaged, not this user's, or of an unknown format; OSError.
    """
    try:
        descriptor = open_file(path / MARKER, os.O_RDONLY)
    except FileNotFoundError:
        strange = [name for name in os.listdir(path) if name != _NEW_MARKER and not _is_store(path / name)]
        if strange:
            raise StoreError(
                f"{path} holds other files ({strange[0]}) and no {MARKER}, so it is not a cache of DejaKV and is left alone: give a "
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
            f"{path / MARKER} is not a file that only you may change, so somebody else may have made this cache: give another folder"
        )
    try:
        marker: Any = json.loads(raw)
    except (ValueError, RecursionError):
        marker = None

    match marker:
        case {"format": int(number)} if number > FORMAT:
            raise StoreError(
                f"the store in {path} has format {number}, made by a newer DejaKV; this one knows {FORMAT}: update DejaKV, or give "
                "another folder"
            )
        case {"format": int(number)} if number > 0:
            return number
        case _:
            raise StoreError(
                f'{path / MARKER} is damaged: write {{"format": {FORMAT}}} into it if the folder has {SEGMENTS}/, or give another folder'
            )


def original_of(path: Path) -> str:
    """The address of the bucket whose copies a store's folder holds; empty if it is a store of its own. Raises: OSError"""
    return str(json.loads((path / MARKER).read_bytes()).get("copies of", ""))


def write_marker(path: Path, original: str = "") -> None:
    """Makes a folder a store, or a bucket's copies. Call it inside `entrance`. Raises: OSError."""
    new = path / _NEW_MARKER
    new.unlink(missing_ok=True)  # left by a process killed here
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
    """A shared lock on a file, until it is closed: on a store's marker, so that nobody deletes or repairs the store meanwhile. Children
    of `fork` hold it too.

    Raises: OSError; BlockingIOError while another process deletes or repairs the store.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = open_file(file, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def alone(self) -> bool:
        """Whether nobody else has a lock on it; then nobody can until `share`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.share()  # a failed attempt to change a lock may lose it
            return False
        return True

    def share(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._descriptor)


def ranks_in(path: Path) -> list[Path]:
    """The folders of tensor-parallel ranks in a folder."""
    return [path / name for name in sorted(os.listdir(path)) if RANK.fullmatch(name) and not (path / name).is_symlink()]


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
        with entrance(folder) as path:
            # Ranks may have stores below a folder that is not a store itself.
            removed = (_delete if format_of(path) is not None else _delete_ranks)(path)
            if removed and not os.listdir(path):
                path.rmdir()  # a link given by the user stays, and then leads nowhere
            return removed
    except OSError as error:
        raise StoreError(f"the store in {folder} cannot be deleted ({error}): check its permissions") from error


def _delete(path: Path) -> int:
    in_use = InUse(path / MARKER)
    try:
        if not in_use.alone():
            raise StoreError(f"the store in {path} is in use: close it in every process before it is deleted")
        removed = _delete_ranks(path)
        # By descriptors: a folder replaced by a link meanwhile leads nowhere.
        for inside, _, files, descriptor in os.fwalk(path, topdown=False):
            ours = [file for file in files if _OUR_FILES.fullmatch(os.path.relpath(f"{inside}/{file}", path))]
            for file in ours:
                os.unlink(file, dir_fd=descriptor)
            removed += len(ours)
            if _OUR_FOLDERS.fullmatch(os.path.relpath(inside, path)):
                with suppress(OSError):  # it holds other files
                    os.rmdir(inside)
        # Last: until then a purge that was killed can be repeated.
        os.unlink(path / MARKER)
        return removed + 1
    finally:
        in_use.close()


def _delete_ranks(path: Path) -> int:
    removed = 0
    for below in ranks_in(path):
        with entrance(below) as rank:
            removed += _delete(rank) if format_of(rank) is not None else 0
        with suppress(OSError):
            below.rmdir()
    return removed


def _is_store(path: Path) -> bool:
    return not path.is_symlink() and (path / MARKER).is_file()


def _locked(folder: Path, make: bool) -> tuple[int, Path]:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder.resolve(strict=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise StoreError(
                    f"{folder} belongs to another user: stored state reveals prompts, so give a folder of your own"
                )
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.lstat(), os.fstat(descriptor)):  # not purged since it was opened
                return descriptor, path
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StoreError(
                    f"another process has kept {path} locked for {_LOCK_SECONDS:.0f} s: end it, or try again"
                ) from error
            # `flock` has no timeout of its own.
            time.sleep(0.005)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
