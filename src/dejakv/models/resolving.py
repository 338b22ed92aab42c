"""Meaning of a `--model` value: a model of this package by name, a folder, a GGUF file, or a hub id."""

import difflib
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.bundled import ROOT, available, known, path
from dejakv.models.fetched import fetched_path
from dejakv.models.gguf import SUFFIX
from dejakv.models.recipe import RECIPES


def names(root: Path = ROOT) -> list[str]:
    """Names of all models of this package: bundled, or fetched once."""
    return [*(model.name for model in available(root)), *RECIPES]


def resolve(name_or_path: str | Path, root: Path = ROOT) -> Path | str:
    """A bundled or fetched name, a local folder or a GGUF file gives its path, anything else is a hub id.

    Raises: ModelError for a damaged model, one that is not fetched yet (naming the command), a folder without
    config.json, a path that does not exist, and a name that looks like a misspelled one of this package.
    """
    text = str(name_or_path)
    if text in RECIPES:
        return fetched_path(text)
    if text in names(root):
        return path(text, root)
    choice = f"{known(root)} or one to fetch ({', '.join(RECIPES)})"
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"{text} is a folder without config.json: give the folder of a checkpoint, or {choice}")
        return local
    if local.suffix == SUFFIX and local.is_file():
        return local
    if (
        isinstance(name_or_path, Path)
        or text.startswith((".", "/", "~"))
        or text.count("/") > 1
        or local.suffix == SUFFIX
    ):
        raise ModelError(f"no checkpoint at {text}: give an existing folder or GGUF file, a hub id, or {choice}")
    if not text.strip():
        raise ModelError(f"the model's name is empty: give a folder, a hub id, or {choice}")
    if "/" not in text and difflib.get_close_matches(text.lower(), names(root), n=1, cutoff=0.6):
        raise ModelError(f"unknown model {text!r}: choose {choice}, a folder, or a hub id")
    return text
