"""The small checkpoints that ship with the package: `load("shapes-vlm")` gives a model and its processor."""

from dejakv.models.bundled import Bundled, available, path, resolve
from dejakv.models.loading import load

__all__ = ["Bundled", "available", "load", "path", "resolve"]
