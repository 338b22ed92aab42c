"""A veto on wording: whatever an embedding says, other content words, numbers, polarity or another kind of question is
another question.

"Turn on" and "turn off" score .915 in an embedding where a real paraphrase scores .673: no threshold separates them.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from dejakv.decide.guards.base import Guard, Verdict
from dejakv.decide.guards.reading import PHRASES, Reading, read
from dejakv.decide.guards.words import OPPOSITES, SYNONYMS
from dejakv.decide.levels.base import Match, Recent
from dejakv.errors import ConfigError
from dejakv.request import Request, nothing_is_kept
from dejakv.store.base import ChunkMeta

QUESTION = "question"
"""Entry of a chunk's `metadata`: `Request.question`."""
REMEMBERED = 4096
"""Texts whose reading is remembered."""


class LexicalGuard(Guard):
    """Accepts two texts whose readings are equal, rejects all others; see `dejakv.decide.guards.reading`.

    vocabulary  words taken for one another; the default has the shapes data set's ("box" is "cube"): pass `words.GENERAL`
                where that is wrong
    synonyms    further words, each with the word it may stand for: `{"automobile": "car"}`; singular, lower case
    phrases     further wordings that ask the same, as regular expressions over the lower-case text and what each stands
                for: `[(r"work as$", "do for a living")]`; they are applied before the built-in ones

    Raises ConfigError for a phrase that is no regular expression.

    >>> guard = LexicalGuard({"vehicle": "car"})
    >>> guard.difference("Is there a red vehicle?", "Do you see a red car?")
    ''
    >>> guard.difference("Turn on the light", "Turn off the light")
    'opposites'
    """

    name = "lexical"
    waived_for_blend = True  # it recomputes what differs, so words may differ

    def __init__(
        self,
        synonyms: Mapping[str, str] | None = None,
        phrases: Iterable[tuple[str, str]] = (),
        *,
        vocabulary: Mapping[str, str] = SYNONYMS,
    ) -> None:
        try:
            self._phrases = (*((re.compile(pattern), wording) for pattern, wording in phrases), *PHRASES)
        except re.error as error:
            raise ConfigError(f"a phrase of the lexical guard is no regular expression: {error}") from error
        self._synonyms = {**vocabulary, **(synonyms or {})}
        for word in self._synonyms:  # a chain of synonyms ends at one word
            self._synonyms[word] = self._root(word)
        self._recent: Recent[Reading] = Recent(REMEMBERED, nothing_is_kept)

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        one, other = texts(request, donor)
        here = self._recent.get(request.partition, one, self._read)
        reason = explain(here, self._recent.get(donor.partition, other, self._read))
        if reason:
            return Verdict("reject", self.name, reason)
        return Verdict("accept", self.name, "same content words, numbers, polarity and kind of question")

    def difference(self, one: str, other: str) -> str:
        """What makes two texts different questions, see `explain`; empty if nothing does. Symmetric but for its wording."""
        return explain(self._read(one), self._read(other))

    def forget(self, partition: str | None) -> None:
        """Forgets the readings of one partition's texts, or of all."""
        self._recent.forget(partition)

    def _read(self, text: str) -> Reading:
        return read(text, self._synonyms, self._phrases)

    def _root(self, word: str) -> str:
        seen: list[str] = []
        while word in self._synonyms and word not in seen:
            seen.append(word)
            word = self._synonyms[word]
        return min(seen) if word in seen else word


def texts(request: Request, donor: ChunkMeta) -> tuple[str, str]:
    """What guards of words read of a request and of a donor: the questions, or the chunks where these are what is asked."""
    asked = donor.metadata.get(QUESTION)
    return (request.question, asked) if request.question and isinstance(asked, str) else (request.chunk, donor.chunk)


def explain(one: Reading, other: Reading) -> str:
    """The first difference in the order of weight, in words of its own and counts: never in the texts' words, which may be
    another caller's. Empty if the readings are equal."""
    if one == other:
        return ""
    if one.negations != other.negations:
        return f"negations differ ({one.negations} against {other.negations})"
    if one.numbers != other.numbers:
        return f"numbers differ ({apart(one.numbers, other.numbers)})"
    if one.kind != other.kind or one.question != other.question:
        return "kinds of question differ"
    if one.asked != other.asked or one.same != other.same:
        return "what is asked of the things differs"
    left = [word for word in one.content if word not in other.content]
    right = [word for word in other.content if word not in one.content]
    if opposed(left, right):
        return "opposites"
    if left or right:
        return f"content words differ ({len(left)} against {len(right)})"
    if one.content != other.content:
        return f"the order of {len(one.content)} content words differs"
    return "verbs differ"


def apart(one: Iterable[str], other: Iterable[str]) -> str:
    """How many items of each the other lacks.

    >>> apart(["3", "5", "7"], ["5"])
    '2 against 0'
    """
    here, there = Counter(one), Counter(other)
    return f"{(here - there).total()} against {(there - here).total()}"


def opposed(one: Collection[str], other: Collection[str]) -> bool:
    """Whether one has a word and the other its opposite."""
    return any((a in one and b in other) or (b in one and a in other) for a, b in OPPOSITES)
