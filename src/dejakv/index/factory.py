"""An index by its name in flags and settings."""

from collections.abc import Callable

from dejakv.config.find import IndexKind
from dejakv.errors import ConfigError
from dejakv.index.base import VectorIndex
from dejakv.index.flat import FlatIndex
from dejakv.index.hnsw import HNSWIndex
from dejakv.index.lsh import LSHIndex

MakeIndex = Callable[[int], VectorIndex]

_KINDS: dict[str, MakeIndex] = {"flat": FlatIndex, "hnsw": HNSWIndex, "lsh": LSHIndex}


def make_index(kind: IndexKind | str, dim: int) -> VectorIndex:
    """An empty index of the kind `flat`, `hnsw` or `lsh`. Raises ConfigError for another name or a dimension below 1."""
    if kind not in _KINDS:
        raise ConfigError(f"index {kind!r} is unknown: choose one of {', '.join(_KINDS)}")
    if dim < 1:
        raise ConfigError(f"an index of dimension {dim} is impossible: give the number of components of its vectors")
    return _KINDS[kind](dim)
