"""L0.5: equal text apart from case, white space, Unicode form and closing punctuation, found by a hash."""

import unicodedata
from hashlib import blake2b

from dejakv.decide.levels.base import Match, Query, Search

CLOSING = ".?!…。？！ \t"
MAX_MATCHES = 8
_DEFAULT_SPACE = "default"


def normalize(text: str) -> str:
    """Normalize a text for comparison. Idempotent.

    Unicode NFKC (full-width letters, ligatures and the like become plain), case folded, white space collapsed and trimmed. Closing marks
    (`. ? ! …` and their full-width forms) are dropped, so "The car?" is "the car"; inner marks stay, so 1.5 is not 15. A text of marks
    alone stays as it is. The lexical guard compares the original texts, and tells "it is red." from "it is red?".

    >>> normalize("  The  CAR? ")
    'the car'
    >>> normalize("1.5") == normalize("15")
    False
    """
    if text.isascii():
        folded = " ".join(text.lower().split())
    else:
        folded = text
        while True:  # folding may undo NFKC (and the other way round) for a few letters: until nothing changes
            again = " ".join(unicodedata.normalize("NFKC", folded.casefold()).split())
            if again == folded:
                break
            folded = again
    return folded.rstrip(CLOSING) or folded


class ExactTextCache:
    """Finds donors by the hash of their normalized text. An empty text matches nothing.

    `record` and `candidates` are for direct use (one default space); `add`, `search` and `remove` are the level's, with spaces.

    >>> cache = ExactTextCache()
    >>> cache.record("Where is the cat?", "chunk_1")
    >>> cache.candidates("where is the CAT")
    ['chunk_1']
    """

    name = "exact_text"
    status_names = ("exact_text",)

    def __init__(self) -> None:
        self._donors: dict[bytes, tuple[str, ...]] = {}
        self._key_of: dict[str, bytes] = {}

    def normalize(self, text: str) -> str:
        """See `dejakv.decide.levels.exact.normalize`."""
        return normalize(text)

    def candidates(self, text: str, space: str = _DEFAULT_SPACE) -> list[str]:
        """Chunk ids recorded for this text, normalized or not, newest first."""
        plain = normalize(text)
        return list(self._donors.get(_key(space, plain), ())) if plain else []

    def record(self, text: str, chunk_id: str, space: str = _DEFAULT_SPACE) -> None:
        """Record a chunk for this text; it leaves the text it was recorded for before."""
        plain = normalize(text)
        if not plain:
            return
        key = _key(space, plain)
        if self._key_of.get(chunk_id) == key:
            return
        self.remove(chunk_id)
        self._donors[key] = (chunk_id, *self._donors.get(key, ()))
        self._key_of[chunk_id] = key

    def search(self, query: Query) -> Search:
        """Return up to 8 matches of score 1.0, newest first; `skip` for an empty text."""
        plain = normalize(query.text)
        if not plain:
            return Search((), {self.name: "skip"})
        donors = self._donors.get(_key(query.space, plain), ())
        matches = tuple(Match(donor, self.name, 1.0) for donor in donors[:MAX_MATCHES])
        return Search(matches, {self.name: "hit" if matches else "miss"})

    def add(self, donor: str, query: Query) -> None:
        self.record(query.text, donor, query.space)

    def remove(self, donor: str) -> None:
        key = self._key_of.pop(donor, None)
        if key is None:
            return
        left = tuple(other for other in self._donors[key] if other != donor)
        if left:
            self._donors[key] = left
        else:
            del self._donors[key]

    def __len__(self) -> int:
        return len(self._key_of)


def _key(space: str, plain: str) -> bytes:
    return blake2b(f"{len(space)}:{space}{plain}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
