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
    """Write the manifest of a folder: the size and SHA-256 of each file directly in it.

    Parameters
    ----------
    folder : Path
        Folder of the model.
    about : str
        Description of the model in one line.
    """
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    content = {
        "about": about,
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in files},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path, repair: str = REPAIR) -> dict[str, Any]:
    """Read the folder's manifest.

    Raises
    ------
    ModelError
        If there is none or it cannot be read. `repair` is the remedy in the message.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        # Reads all that callers use: a damaged manifest fails here.
        _ = content["about"], [(f["bytes"], f["sha256"]) for f in content["files"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model {folder.name}: its {MANIFEST} cannot be read ({error!r}): {repair}"
        ) from error

    return content


def verify(folder: Path, repair: str = REPAIR) -> dict[str, Any]:
    """Compare the files that a manifest lists with it, and return the manifest.

    Other files of the folder are not looked at. An unchanged file is read only once.

    Raises
    ------
    ModelError
        Naming the first file that is missing or differs. `repair` is the remedy in the message.
    """
    # Files that the manifest does not list are not looked at.
    content = read_manifest(folder, repair)
    for name, expected in content["files"].items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"model {folder.name}: {name} is missing: {repair}")
        # The size first: a digest reads the whole file.
        if file.stat().st_size != expected["bytes"] or digest(file) != expected["sha256"]:
            raise ModelError(
                f"model {folder.name}: {name} is truncated or changed, its checksum differs: "
                f"{repair}"
            )

    return content


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    status = file.stat()
    # The stamps are a part of the key: a changed file is read again.
    return _digest(str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _digest(file: str, *_stamp: int) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
