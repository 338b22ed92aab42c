"""Level 0.5: equal text by a hash.

Composition of Unicode, the case of words and the white space of prose may differ.
"""

from hashlib import blake2b

from dejakv.decide.levels.base import LevelSearch, Match, Query
from dejakv.decide.literals import normalize

MAX_MATCHES = 8
_DEFAULT_SPACE = "default"


class ExactTextCache:
    """Level that finds donors by the hash of their normalized text.

    An empty text matches nothing. `record` and `candidates` are for direct use, in one default
    space. `add`, `search` and `remove` are the level's, with spaces.

    Examples
    --------
    >>> cache = ExactTextCache()
    >>> cache.record("Where is the cat?", "chunk_1")
    >>> cache.candidates("where is  the cat?")
    ['chunk_1']
    """

    name = "exact_text"
    status_names = ("exact_text",)

    def __init__(self) -> None:
        self._donors: dict[bytes, tuple[str, ...]] = {}
        self._key_of: dict[str, bytes] = {}

    def normalize(self, text: str) -> str:
        """Normalize a text as `dejakv.decide.literals.normalize` does.

        Parameters
        ----------
        text : str
            Text to compare.

        Returns
        -------
        str
            Normalized text.
        """
        return normalize(text)

    def candidates(self, text: str, space: str = _DEFAULT_SPACE) -> list[str]:
        """Return the ids recorded for this text, normalized or not, newest first.

        Parameters
        ----------
        text : str
            Text to look up.
        space : str
            Name that separates requests that must never match.

        Returns
        -------
        list[str]
            Ids of stored prompts, newest first. It is empty for an empty text.
        """
        plain = normalize(text)
        return list(self._donors.get(_key(space, plain), ())) if plain else []

    def record(self, text: str, chunk_id: str, space: str = _DEFAULT_SPACE) -> None:
        """Record a stored prompt for this text, in place of the text it was recorded for before.

        Parameters
        ----------
        text : str
            Chunk of the prompt. An empty text is not recorded.
        chunk_id : str
            Id of the prompt in its store.
        space : str
            Name that separates requests that must never match.
        """
        plain = normalize(text)
        if not plain:
            return

        key = _key(space, plain)
        if self._key_of.get(chunk_id) == key:
            return

        # It may have stood for another text, which must not find it any more.
        self.remove(chunk_id)

        # The newest first, as `search` returns them.
        self._donors[key] = (chunk_id, *self._donors.get(key, ()))
        self._key_of[chunk_id] = key

    def search(self, query: Query) -> LevelSearch:
        """Return up to 8 matches of score 1.0, newest first; `skip` for an empty text.

        Parameters
        ----------
        query : Query
            Request and its space.

        Returns
        -------
        LevelSearch
            Matches and the status of `exact_text`.
        """
        plain = normalize(query.text)
        if not plain:
            return LevelSearch((), {self.name: "skip"})
        donors = self._donors.get(_key(query.space, plain), ())

        matches = tuple(Match(donor, self.name, 1.0) for donor in donors[:MAX_MATCHES])
        return LevelSearch(matches, {self.name: "hit" if matches else "miss"})

    def add(self, donor: str, query: Query) -> None:
        """Record the donor for the query's text.

        Parameters
        ----------
        donor : str
            Id of the donor's state.
        query : Query
            Request and its space.
        """
        self.record(query.text, donor, query.space)

    def remove(self, donor: str) -> None:
        """Remove a donor from the text it was recorded for.

        Parameters
        ----------
        donor : str
            Id of the donor's state. An unknown id is ignored.
        """
        key = self._key_of.pop(donor, None)
        if key is None:
            return
        # Several prompts may share one normalized text, so the others stay.
        remaining_donors = tuple(candidate for candidate in self._donors[key] if candidate != donor)
        if remaining_donors:
            self._donors[key] = remaining_donors
        else:
            del self._donors[key]

    def __len__(self) -> int:
        return len(self._key_of)


def _key(space: str, plain: str) -> bytes:
    return blake2b(
        f"{len(space)}:{space}{plain}".encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
