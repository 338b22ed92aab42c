"""The models that ship with the package."""

from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.manifest import MANIFEST, read_manifest, verify

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Bundled:
    """A model that ships with the package: its name, a line about it, the size of its files in bytes, its folder."""

    name: str
    about: str
    nbytes: int
    folder: Path


def available(root: Path = ROOT) -> list[Bundled]:
    """The bundled models, by name. `root` is their folder: the package's, unless a test gives another."""
    found: list[Bundled] = []
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        content = read_manifest(manifest.parent)
        size = sum(f["bytes"] for f in content["files"].values())
        found.append(Bundled(manifest.parent.name, content["about"], size, manifest.parent))
    return found


def path(name: str, root: Path = ROOT) -> Path:
    """The folder of a bundled model, its files checked against their checksums.

    Raises: ModelError for an unknown name (listing the known) and for missing, truncated or changed files.
    """
    for model in available(root):
        if model.name == name:
            verify(model.folder)
            return model.folder
    raise ModelError(f"no bundled model has the name {name!r}: choose {known(root)}")


def known(root: Path = ROOT) -> str:
    """The bundled models as part of a message."""
    return "one of the bundled ones (" + ", ".join(m.name for m in available(root)) + ")"
