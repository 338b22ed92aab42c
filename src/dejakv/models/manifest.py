"""The manifest of a model's folder: its files with their sizes and digests."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from dejakv.errors import ModelError

MANIFEST = "manifest.json"
REPAIR = "reinstall dejakv-models, or train it again (research/training/README.md)"


def write_manifest(folder: Path, about: str) -> None:
    """Record all files of the folder as they are now. `about` describes the model in a line."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    content = {
        "about": about,
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in files},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path, repair: str = REPAIR) -> dict[str, Any]:
    """The folder's manifest. Raises ModelError if there is none or it cannot be read; `repair` is the remedy in the message."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        # Reads all that callers use: a damaged manifest fails here.
        _ = content["about"], [(f["bytes"], f["sha256"]) for f in content["files"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model {folder.name}: its {MANIFEST} cannot be read ({error!r}): {repair}") from error
    return content


def verify(folder: Path, repair: str = REPAIR) -> dict[str, Any]:
    """Compare every file with the manifest, and return it. A process reads an unchanged file only once.

    Raises: ModelError naming the first file that is missing or differs.
    """
    content = read_manifest(folder, repair)
    for name, expected in content["files"].items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"model {folder.name}: {name} is missing: {repair}")
        # The size first: a digest reads the whole file.
        if file.stat().st_size != expected["bytes"] or digest(file) != expected["sha256"]:
            raise ModelError(f"model {folder.name}: {name} is truncated or changed, its checksum differs: {repair}")
    return content


def digest(file: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    status = file.stat()
    # The stamps are a part of the key: a changed file is read again.
    return _digest(str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _digest(file: str, *_stamp: int) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
