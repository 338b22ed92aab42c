"""The file that makes a folder a store: its format, and a random id that shows whether a folder is still the same."""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from dejakv.errors import StoreError
from dejakv.store.directory import Directory, is_our_file
from dejakv.store.names import MARKER, NEW_MARKER

FORMAT = 2
"""Of the whole folder. Format 1 knew no parents: every chunk was whole. Stores made before there was a marker are like it."""
_FORMATS = (1, FORMAT)
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Marker:
    """Content of the marker."""

    id: str
    format: int = FORMAT


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
                f"{directory.path / MARKER} is damaged: remove this one file, so that the store is recognised by its catalog, "
                "or give another folder"
            )


def update_marker(directory: Directory, marker: Marker) -> None:
    """Notes that the folder has this version's format. In place, because processes hold locks on the file; one digit changes,
    so that it cannot be half written. Raises: OSError."""
    descriptor = directory.open_file(MARKER, os.O_WRONLY)
    try:
        os.pwrite(descriptor, _text(Marker(marker.id)), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_marker(directory: Directory) -> Marker:
    """Makes a folder a store. Call it while no other process can. Raises: OSError."""
    marker = Marker(secrets.token_hex(16))
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
