"""Models by name: bundled, fetched once (`dejakv models get`), folders, GGUF files and hub ids.

`load("docs-lm")` returns a model and its tokenizer. The bundled models are files of the
distribution `dejakv-models`.
"""

from dejakv.models.loading import load, resolve
from dejakv.models.table import (
    RECIPES,
    ModelRecipe,
    available,
    fetched,
    models_dir,
    names,
    path,
    tokenizer_folder,
)

__all__ = [
    "RECIPES",
    "ModelRecipe",
    "available",
    "fetched",
    "load",
    "models_dir",
    "names",
    "path",
    "resolve",
    "tokenizer_folder",
]
