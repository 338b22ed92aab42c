"""Level 1: texts of similar meaning, by the cosine of embeddings."""

from typing import overload

from dejakv.config import SIMILARITY_THRESHOLD
from dejakv.decide.levels.base import LevelSearch, Match, Query
from dejakv.errors import ConfigError, InputError
from dejakv.identity import epoch_of
from dejakv.vectors.base import TextEncoder, Vector
from dejakv.vectors.spaces import VectorSpaces
from dejakv.vectors.text import varying_part

MAX_MATCHES = 8
_DEFAULT_SPACE = "default"


class SemanticTextCache:
    """Level that finds donors by text embeddings with a cosine of at least `threshold`.

    `search(text)` and `add(chunk_id, text)` are for direct use, in one default space.
    `search(query)`, `add(donor, query)` and `remove` are the level's, with spaces.

    Parameters
    ----------
    encoder : TextEncoder
        Encoder of the texts.
    threshold : float
        Least cosine, in [-1, 1]. 0 is a threshold like any other.
    chunk_window : int
        Characters to embed, 0 for all (see `dejakv.vectors.text`).
    index : {"flat", "hnsw"}
        Kind of index; `flat` is exact.

    Raises
    ------
    ConfigError
        For a threshold that is no cosine, and for a negative `chunk_window`.

    Examples
    --------
    >>> import numpy as np
    >>> from dejakv.vectors.text import ModelTextEncoder
    >>> letters = lambda text: np.array([text.count(letter) for letter in "abcdefghij"])
    >>> cache = SemanticTextCache(ModelTextEncoder(letters, "letters"), threshold=0.8)
    >>> cache.add("chunk_1", "a big cat")
    >>> cache.search("the big cat, a").donor
    'chunk_1'
    """

    name = "semantic_text"
    status_names = ("semantic_text",)

    def __init__(
        self,
        encoder: TextEncoder,
        threshold: float = SIMILARITY_THRESHOLD,
        chunk_window: int = 0,
        *,
        index: str = "flat",
    ) -> None:
        if not -1.0 <= threshold <= 1.0:
            raise ConfigError(
                f"threshold={threshold} is no cosine: give a number from -1 to 1 "
                f"({SIMILARITY_THRESHOLD} is usual)"
            )
        if chunk_window < 0:
            raise ConfigError(
                f"chunk_window={chunk_window} is negative: give a number of characters, 0 for all"
            )

        self.encoder = encoder
        self.threshold = threshold
        self.chunk_window = chunk_window
        self._spaces = VectorSpaces(kind=index)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of encoder and window; stored vectors of another one are ignored."""
        return epoch_of({"encoder": self.encoder.fingerprint, "window": self.chunk_window})

    @property
    def thresholds(self) -> dict[str, float]:
        """Thresholds by `Match.level`, for a `ThresholdGuard`."""
        return {self.name: self.threshold}

    def vector(self, text: str) -> Vector | None:
        """Return the unit vector of a text; None for one without a direction.

        Parameters
        ----------
        text : str
            Text to embed.

        Returns
        -------
        Vector or None
            Vector of shape [dim], float32, of length 1. It is None for a text without a direction.
        """
        part = varying_part(text, self.chunk_window)

        # There is nothing to embed, and no donor should match an empty text.
        if not part:
            return None
        try:
            return self.encoder.encode(part)
        except InputError:
            return None

    def encode(self, query: Query) -> None:
        """Compute the vector of the query's text, unless it is stored with a prompt.

        Parameters
        ----------
        query : Query
            Query whose `encoded["text"]` is set, unless it is there.
        """
        # Once a query, also where several levels or a later storing need it.
        if "text" not in query.encoded:
            query.encoded["text"] = self.vector(query.text)

    @overload
    def search(self, query: Query) -> LevelSearch: ...

    @overload
    def search(self, query: str) -> Match | None: ...

    def search(self, query: Query | str) -> LevelSearch | Match | None:
        """Search by a `Query`, or by a text in the default space.

        Parameters
        ----------
        query : Query or str
            Request and its space, or a text.

        Returns
        -------
        LevelSearch or Match or None
            For a `Query` up to 8 matches, best first. For a text the best match, or None.
        """
        if isinstance(query, str):
            return next(iter(self.search_vector(self.vector(query))), None)
        self.encode(query)

        # A text without a direction, such as an empty one, resembles nothing.
        vector = query.encoded["text"]
        if vector is None:
            return LevelSearch((), {self.name: "skip"})

        matches = self.search_vector(vector, query.space)
        return LevelSearch(matches, {self.name: "hit" if matches else "miss"})

    def search_vector(
        self, vector: Vector | None, space: str = _DEFAULT_SPACE
    ) -> tuple[Match, ...]:
        """Return up to 8 matches of a vector, best first.

        Parameters
        ----------
        vector : Vector or None
            Unit vector of shape [dim], float32. None matches nothing.
        space : str
            Name that separates requests that must never match.

        Returns
        -------
        tuple[Match, ...]
            Matches with a cosine of at least `threshold`, best first.
        """
        if vector is None:
            return ()

        hits = self._spaces.search(space, vector, MAX_MATCHES, self.threshold)
        return tuple([Match(id, self.name, score) for id, score in hits])

    @overload
    def add(self, donor: str, query: Query) -> None: ...

    @overload
    def add(self, donor: str, query: str, vector: Vector | None = None) -> None: ...

    def add(self, donor: str, query: Query | str, vector: Vector | None = None) -> None:
        """Add a stored prompt as a donor.

        Parameters
        ----------
        donor : str
            Id of the donor's state.
        query : Query or str
            Request and its space, or a text in the default space.
        vector : Vector, optional
            Vector of the text (`StateInfo.vectors["text"]`), if it was computed before. It is
            ignored for a `Query`.
        """
        if isinstance(query, str):
            row = self.vector(query) if vector is None else vector
            space = _DEFAULT_SPACE
        else:
            self.encode(query)
            row, space = query.encoded["text"], query.space

        # Without a vector no search could return it.
        if row is not None:
            self._spaces.add(space, donor, row)

    def remove(self, donor: str) -> None:
        """Remove a donor from all spaces.

        Parameters
        ----------
        donor : str
            Id of the donor's state.
        """
        self._spaces.remove(donor)

    def __len__(self) -> int:
        return len(self._spaces)
