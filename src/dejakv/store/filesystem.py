"""What kind of file system a folder is on: a catalog needs one that a single machine has to itself.

SQLite's WAL keeps its index in memory that all processes share, so that all must be on one machine (https://sqlite.org/wal.html),
and locks and renames of network file systems do not hold what a store needs of them.
"""

import re
from pathlib import Path

from dejakv.errors import StoreError

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
