"""What a bundled checkpoint consists of: every file with its size and SHA-256, written when it is shipped."""

import hashlib
import json
from pathlib import Path
from typing import Any

from dejakv.errors import ModelError

MANIFEST = "manifest.json"
REPAIR = "reinstall dejakv, or train it again (training/README.md)"


def write_manifest(folder: Path, about: str) -> None:
    """Record all files of the folder as they are now. `about` says in a line what the model is."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    content = {
        "about": about,
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises ModelError if there is none or it cannot be read."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"bundled model {folder.name}: its {MANIFEST} cannot be read ({error}): {REPAIR}") from error


def verify(folder: Path) -> None:
    """Compare every file with the manifest. Raises ModelError naming the first that is missing or differs."""
    for name, expected in read_manifest(folder)["files"].items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"bundled model {folder.name}: {name} is missing: {REPAIR}")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ModelError(
                f"bundled model {folder.name}: {name} has {size} bytes instead of {expected['bytes']} "
                f"(truncated or changed): {REPAIR}"
            )
        if _digest(file) != expected["sha256"]:
            raise ModelError(f"bundled model {folder.name}: {name} is damaged, its checksum differs: {REPAIR}")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
