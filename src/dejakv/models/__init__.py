"""Models by name: those of the distribution `dejakv-models`, those that are fetched once (`dejakv models get`), folders, GGUF files
and hub ids. `load("docs-lm")` gives a model and its tokenizer."""

from dejakv.models.bundled import Bundled, available, path
from dejakv.models.fetched import RECIPES, Fetched, Recipe, fetched, models_dir, tokenizer_folder
from dejakv.models.loading import load, names, resolve

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
