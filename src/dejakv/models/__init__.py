"""Models by name: those of the distribution `dejakv-models`, those that are fetched once (`dejakv models get`), folders, GGUF files
and hub ids. `load("docs-lm")` gives a model and its tokenizer."""

from dejakv.models.loading import load, resolve
from dejakv.models.table import RECIPES, ModelRecipe, available, fetched, models_dir, names, path, tokenizer_folder

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
