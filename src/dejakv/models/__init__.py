"""Models by name: those that ship with the package, those that are fetched once (`dejakv models get`), folders, GGUF files
and hub ids. `load("docs-lm")` gives a model and its tokenizer."""

from dejakv.models.bundled import Bundled, available, path
from dejakv.models.fetched import Fetched, fetched, models_dir, tokenizer_folder
from dejakv.models.loading import load
from dejakv.models.recipe import RECIPES, Recipe
from dejakv.models.resolving import names, resolve

__all__ = [
    "RECIPES",
    "Bundled",
    "Fetched",
    "Recipe",
    "available",
    "fetched",
    "load",
    "models_dir",
    "names",
    "path",
    "resolve",
    "tokenizer_folder",
]
