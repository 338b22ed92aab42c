"""Which models ship with the package, where they lie, and what a `--model` value means."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.manifest import MANIFEST, read_manifest, verify

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Bundled:
    """A model that ships with the package: its name, a line about it, the size of its files in bytes, its folder."""

    name: str
    about: str
    nbytes: int
    folder: Path


def available(root: Path = _HERE) -> list[Bundled]:
    """The bundled models, by name. `root` is where they lie: the package, unless a test says otherwise."""
    found: list[Bundled] = []
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        content = read_manifest(manifest.parent)
        size = sum(f["bytes"] for f in content["files"].values())
        found.append(Bundled(manifest.parent.name, content["about"], size, manifest.parent))
    return found


def path(name: str, root: Path = _HERE) -> Path:
    """The folder of a bundled model, its files checked against their checksums.

    Raises: ModelError for an unknown name (listing the known) and for missing, truncated or changed files.
    """
    for model in available(root):
        if model.name == name:
            verify(model.folder)
            return model.folder
    raise ModelError(f"no bundled model is called {name!r}: choose {_known(root)}")


def resolve(name_or_path: str | Path, root: Path = _HERE) -> Path | str:
    """What a `--model` value means: a bundled name or a local folder gives its path, anything else is a hub id.

    Raises: ModelError for a damaged bundled model, a folder without config.json, a path where nothing is, and a
    name that looks like a misspelled bundled one.
    """
    text = str(name_or_path)
    names = [m.name for m in available(root)]
    if text in names:
        return path(text, root)
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(
                f"{text} is a folder without config.json: give the folder of a checkpoint, or {_known(root)}"
            )
        return local
    if isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(f"no checkpoint at {text}: give an existing folder, a hub id, or {_known(root)}")
    if not text.strip():
        raise ModelError(f"the model's name is empty: give a folder, a hub id, or {_known(root)}")
    if "/" not in text and difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.6):
        raise ModelError(f"unknown model {text!r}: choose {_known(root)}, a folder, or a hub id")
    return text


def _known(root: Path) -> str:
    return "one of the bundled ones (" + ", ".join(m.name for m in available(root)) + ")"
