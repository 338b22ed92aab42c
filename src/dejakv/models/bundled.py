"""The models of the distribution `dejakv-models`, which holds files and no code, and their manifests of digests."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dejakv.errors import MissingExtraError, ModelError

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
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ModelError(
                f"model {folder.name}: {name} has {size} bytes instead of {expected['bytes']} "
                f"(truncated or changed): {repair}"
            )
        if digest(file) != expected["sha256"]:
            raise ModelError(f"model {folder.name}: {name} is damaged, its checksum differs: {repair}")
    return content


def digest(file: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    status = file.stat()
    return _digest(str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _digest(file: str, *_stamp: int) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


BUNDLED = ("docs-lckv", "docs-lm", "shapes-vlm")
_CHECKOUT = "; in a checkout of dejakv: python -m pip install ./packages/dejakv-models"


@dataclass(frozen=True)
class Bundled:
    """A model of `dejakv-models`: its name, a line about it, the size of its files in bytes, its folder."""

    name: str
    about: str
    nbytes: int
    folder: Path


def root_of(purpose: str) -> Path:
    """The folder of the installed distribution. `purpose` begins the message of the error.

    Raises: MissingExtraError if it is not installed.
    """
    if found := _installed():
        return found
    raise MissingExtraError("dejakv-models", "models", purpose, _CHECKOUT)


def _installed() -> Path | None:
    spec = find_spec("dejakv_models")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def available(root: Path | None = None) -> list[Bundled]:
    """The bundled models, by name; none where `dejakv-models` is not installed. `root` is another folder of models."""
    root = root or _installed()
    if root is None:
        return []
    found: list[Bundled] = []
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        content = read_manifest(manifest.parent)
        size = sum(f["bytes"] for f in content["files"].values())
        found.append(Bundled(manifest.parent.name, content["about"], size, manifest.parent))
    return found


def path(name: str, root: Path | None = None) -> Path:
    """The folder of a bundled model, its files checked against their checksums.

    Raises: ModelError for an unknown name (listing the known) and for missing, truncated or changed files; MissingExtraError
    if `dejakv-models` is not installed.
    """
    if root is None and name in BUNDLED:
        root = root_of(f"the model {name}")
    for model in available(root):
        if model.name == name:
            verify(model.folder)
            return model.folder
    raise ModelError(f"no bundled model has the name {name!r}: choose {known(root)}")


def bundled_names(root: Path | None = None) -> list[str]:
    """Names of the bundled models, installed or not."""
    return [model.name for model in available(root)] if root else list(BUNDLED)


def known(root: Path | None = None) -> str:
    """The bundled models as part of a message."""
    return "one of the bundled ones (" + ", ".join(bundled_names(root)) + ")"
