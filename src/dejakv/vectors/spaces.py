"""Indexes by space, so that vectors of two spaces are never compared, and the latent layers."""

from dataclasses import dataclass

from dejakv.config import SIMILARITY_THRESHOLD, IndexKind
from dejakv.errors import ConfigError
from dejakv.vectors.base import ANY, Hit, Vector, unit_vector
from dejakv.vectors.flat import FlatIndex
from dejakv.vectors.hnsw import HNSWIndex

INDEXES: dict[str, type[FlatIndex]] = {"flat": FlatIndex, "hnsw": HNSWIndex}


def make_index(kind: IndexKind | str, dim: int) -> FlatIndex:
    """Make an empty index of the kind `flat` or `hnsw`.

    Raises
    ------
    ConfigError
        For another kind, or a dimension below 1.

    Examples
    --------
    >>> make_index("flat", 384).dim
    384
    """
    if kind not in INDEXES:
        raise ConfigError(f"index {kind!r} is unknown: choose one of {', '.join(INDEXES)}")
    if dim < 1:
        raise ConfigError(
            f"an index of dimension {dim} is impossible: give the number of components of its "
            "vectors"
        )

    return INDEXES[kind](dim)


class VectorSpaces:
    """Donors by space, for searches by cosine. A donor is in one space at a time. Not thread-safe.

    Thousands of small spaces are cheap.

    Parameters
    ----------
    dim : int, optional
        Components of the vectors; None takes those of the first vector.
    kind : str
        Index of each space: `flat` (exact) or `hnsw`.

    Raises
    ------
    ConfigError
        For another kind.

    Examples
    --------
    >>> spaces = VectorSpaces(dim=2)
    >>> spaces.add("tenant a", "donor", [1, 0])
    >>> spaces.search("tenant a", [1, 0])
    [('donor', 1.0)]
    >>> spaces.search("tenant b", [1, 0])
    []
    """

    def __init__(self, dim: int | None = None, kind: str = "flat") -> None:
        make_index(kind, dim or 1)
        self.dim = dim
        self.kind = kind
        self._index_of: dict[str, FlatIndex] = {}
        self._space_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._space_of)

    def get(self, space: str) -> FlatIndex | None:
        """Return the index of a space; None if the space is empty."""
        return self._index_of.get(space)

    def add(self, space: str, donor: str, vector: Vector) -> None:
        """Add a donor, or replace it. An error, as of `FlatIndex`, changes nothing."""
        self.dim = self.dim or len(vector)
        # Before anything is removed: a vector that does not fit must leave the old one.
        row = unit_vector(vector, self.dim)
        if self._space_of.get(donor, space) != space:
            self.remove(donor)
        index = self._index_of.get(space)
        if index is None:
            index = self._index_of[space] = make_index(self.kind, self.dim)
        index.add(donor, row)
        self._space_of[donor] = space

    def search(self, space: str, vector: Vector, k: int = 1, min_score: float = ANY) -> list[Hit]:
        """Search within one space, as `FlatIndex.search` does."""
        index = self._index_of.get(space)
        return index.search(vector, k, min_score) if index is not None else []

    def remove(self, donor: str) -> bool:
        """Remove a donor, and return whether it was known."""
        space = self._space_of.pop(donor, None)
        if space is None:
            return False
        index = self._index_of[space]
        index.remove(donor)
        # Spaces of former epochs would pile up.
        if not len(index):
            del self._index_of[space]
        return True


@dataclass(frozen=True)
class LayerSpec:
    """Declaration of one latent layer.

    Attributes
    ----------
    name : str
        Name of the layer, without a colon.
    dim : int, optional
        Components of its vectors; None (`auto`) takes those of the first vector.
    threshold : float
        Least cosine, in [-1, 1]. 0 is a threshold like any other.

    Raises
    ------
    ConfigError
        For an empty name, one with a colon or `mean`, a dimension below 1, and a threshold outside
        [-1, 1].
    """

    name: str
    dim: int | None
    threshold: float = SIMILARITY_THRESHOLD

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise ConfigError(
                f"a latent layer cannot be named {self.name!r}: give a name without a colon"
            )

        if self.name == "mean":
            raise ConfigError(
                "a latent layer cannot be named 'mean', which is the combination of all: rename it"
            )

        if self.dim is not None and self.dim < 1:
            raise ConfigError(
                f"layer {self.name!r} has dimension {self.dim}: give the components of its "
                "vectors, or 'auto'"
            )

        if not -1.0 <= self.threshold <= 1.0:
            raise ConfigError(
                f"layer {self.name!r} has threshold {self.threshold}: give a cosine from -1 to 1"
            )

    def misfit(self, but: str, width: object) -> str:
        """Return the message about vectors of another dimension, with a declaration that fits.

        Parameters
        ----------
        but : str
            What has the other dimension, as a clause.
        width : object
            Components of the vectors, for the declaration.
        """
        return (
            f"layer {self.name!r} was declared with dimension {self.dim}, but {but}: write "
            f"{self.name}:{width}:{self.threshold:g} in embedding_layers (--embedding-layer)"
        )

    @classmethod
    def parse(cls, text: str) -> "LayerSpec":
        """Parse a declaration such as `prompt:384`, `vision:512:0.82` or `prompt:auto:0.9`.

        Raises
        ------
        ConfigError
            For any other text.

        Examples
        --------
        >>> LayerSpec.parse("vision:512:0.82")
        LayerSpec(name='vision', dim=512, threshold=0.82)
        """
        try:
            name, dim, *rest = (part.strip() for part in text.split(":"))
            # One value exactly: a fourth part makes the unpacking fail, too.
            (threshold,) = map(float, rest or [SIMILARITY_THRESHOLD])
            size = None if dim.lower() == "auto" else int(dim)
        except ValueError:
            raise ConfigError(
                f"embedding_layers: {text!r} (--embedding-layer) is not NAME:DIM[:THRESHOLD], a "
                "whole number or auto and a number: "
                "write for example vision:512:0.82"
            ) from None

        return cls(name, size, threshold)
