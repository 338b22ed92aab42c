"""L0.5: equal text apart from Unicode's composition, the case of words and the white space of prose, by a hash."""

import re
import unicodedata
from hashlib import blake2b

from dejakv.decide.levels.base import Match, Query, Search
from dejakv.decide.literals import is_shouted, tokens

MAX_MATCHES = 8
_DEFAULT_SPACE = "default"
_QUOTE = re.compile(r"[\"`“”«»]|(?<!\w)['‘’]")
_SPACE = re.compile(r"(\s+)")


def normalize(text: str) -> str:
    """Normalize a text for comparison. Idempotent.

    Unicode NFC; plain words are lower case, unless the case carries meaning (`US`, `getName`). White space is collapsed in texts of one
    line without quotes; elsewhere it may be code, and only that around the text is trimmed. All marks and forms of digits stay.

    >>> normalize("  The  car? ")
    'the car?'
    >>> normalize("10⁶") == normalize("106")
    False
    """
    text = unicodedata.normalize("NFC", text)
    lines = text.splitlines()
    # Line by line: the indentation of the first line with text must stay.
    while lines and not lines[0].strip():
        del lines[0]

    shouted = is_shouted(text)
    if len(text.strip().splitlines()) < 2 and not _QUOTE.search(text):
        folded = " ".join(token.folded for token in tokens(text, shouted=shouted))
    else:
        folded = "\n".join(_folded(line, shouted) for line in lines).rstrip()
    # Once more: lower case may take NFC apart, and equal texts must have one hash.
    return unicodedata.normalize("NFC", folded)


def _folded(line: str, shouted: bool) -> str:
    """The line with its white space."""
    folded = (token.folded for token in tokens(line, shouted=shouted))
    return "".join(part if not part or part.isspace() else next(folded) for part in _SPACE.split(line))


class ExactTextCache:
    """Finds donors by the hash of their normalized text. An empty text matches nothing.

    `record` and `candidates` are for direct use (one default space); `add`, `search` and `remove` are the level's, with spaces.

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
        # It may have stood for another text, which must not find it any more.
        self.remove(chunk_id)
        # The newest first, as `search` returns them.
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
        remaining_donors = tuple(candidate for candidate in self._donors[key] if candidate != donor)
        if remaining_donors:
            self._donors[key] = remaining_donors
        else:
            del self._donors[key]

    def __len__(self) -> int:
        return len(self._key_of)


def _key(space: str, plain: str) -> bytes:
    return blake2b(f"{len(space)}:{space}{plain}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
