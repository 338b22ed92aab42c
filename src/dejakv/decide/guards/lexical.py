"""A veto on wording: other content words, numbers or polarity make another question.

"Turn on" and "turn off" score .915 in an embedding where a real paraphrase scores .673, so no
threshold separates them. A `QuestionReading` is what a text asks, as far as its words show it. Two
texts with equal readings ask the same.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dejakv.decide.guards import words as data
from dejakv.decide.guards.base import Guard, GuardVerdict
from dejakv.decide.levels.base import Match
from dejakv.decide.literals import literals
from dejakv.errors import ConfigError
from dejakv.request import Request
from dejakv.store.base import StateInfo

QUESTION = "question"
"""Key in a stored prompt's `metadata`: `Request.question`."""

Phrase = tuple[re.Pattern[str], str]

PHRASES: tuple[Phrase, ...] = tuple(
    (re.compile(pattern), wording) for pattern, wording in data.PHRASES
)
_FRAMES = tuple(re.compile(pattern) for pattern in data.FRAMES)
_CLOSING = ".?!…。？！ \t"
_STRAIGHT = str.maketrans("’‘“”", "''\"\"")
_THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
_IF = re.compile(r"^(?:if|whether)\b")
_WHICH = re.compile(r"\bwhich\b")
_CONTRACTIONS = tuple(
    (re.compile(pattern), wording)
    for pattern, wording in (
        (r"\bcan't\b", "can not"),
        (r"\bwon't\b", "will not"),
        (r"n't\b", " not"),
        (r"\b(what|who|where|when|why|how|it|that|there|here|he|she)'s\b", r"\1 is"),
        (r"'re\b", " are"),
        (r"'ll\b", " will"),
        (r"'s\b", " possessive"),
    )
)
# Numbers, words, and every other mark but those of ordinary prose: "☂" is not "☀", and
# "2*(3+4)" is not "(2*3)+4".
_TOKEN = re.compile(
    r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:[-'][^\W\d_]+)*|[^\w\s.,;:!?'\"…。？！、，：；“”«»]"
)
_BE = frozenset("is are am was were be been being".split())
_DO = frozenset("do does did".split())
_MODAL = frozenset("can could will would shall should may might must".split())
_PAST = frozenset("was were did".split())
_WH = frozenset("what who whose where when why how".split())
_DROPPED = frozenset(("the", "an", "of"))
_NO_NOUNS = frozenset(
    "to from or and right wrong correct left above below in on at by for with "
    "than as of the not".split()
)
_SPATIAL = frozenset("left right above below".split())
_LINKS = frozenset("and with as".split())
_ENDING_S = ("ss", "us", "is")


class LexicalGuard(Guard):
    """Guard that accepts two texts with equal readings and rejects all others.

    Parameters
    ----------
    synonyms : Mapping[str, str], optional
        Further words, each with the word it may stand for, singular and lower case: `{"automobile":
        "car"}`.
    phrases : Iterable[tuple[str, str]]
        Further wordings that ask the same, as regular expressions over the lower-case text with
        what each stands for: `[(r"work as$", "do for a living")]`. They are applied before the
        built-in ones.
    vocabulary : Mapping[str, str]
        Words that are taken for one another. The default has those of the shapes data set, where
        "box" is "cube"; `words.GENERAL` is without them.

    Raises
    ------
    ConfigError
        For a phrase that is no regular expression.

    Examples
    --------
    >>> guard = LexicalGuard({"vehicle": "car"})
    >>> guard.difference("Is there a red vehicle?", "Do you see a red car?")
    ''
    >>> guard.difference("Turn on the light", "Turn off the light")
    'content words differ'
    """

    name = "lexical"
    # A blend recomputes what differs, so words may differ.
    waived_for_blend = True

    def __init__(
        self,
        synonyms: Mapping[str, str] | None = None,
        phrases: Iterable[tuple[str, str]] = (),
        *,
        vocabulary: Mapping[str, str] = data.SYNONYMS,
    ) -> None:
        try:
            self._phrases = (
                *((re.compile(pattern), wording) for pattern, wording in phrases),
                *PHRASES,
            )
        except re.error as error:
            raise ConfigError(
                f"a phrase of the lexical guard is no regular expression: {error}"
            ) from error
        self._synonyms = {**vocabulary, **(synonyms or {})}
        # A chain of synonyms ends at one word.
        for word in self._synonyms:
            self._synonyms[word] = self._root(word)

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        """Accept a donor with the same question by `difference`, and reject others.

        The compared texts stand in where one of the two requests names no question.
        """
        donor_question = donor.metadata.get(QUESTION)
        if request.question and isinstance(donor_question, str):
            reason = self.difference(request.question, donor_question)
        else:
            reason = self.difference(request.chunk, donor.chunk)
        if reason:
            return GuardVerdict("reject", self.name, reason)
        return GuardVerdict(
            "accept", self.name, "same content words, numbers, polarity and kind of question"
        )

    def difference(self, first_text: str, second_text: str) -> str:
        """Return why two texts are different questions, or an empty string.

        Their readings differ (see `explain`), or what carries meaning by its form (see
        `dejakv.decide.literals`), or, where the words are the same, the marks between them. The
        order of the two texts does not matter.
        """
        if first_text == second_text:
            return ""
        first_reading, second_reading = (
            read(text, self._synonyms, self._phrases) for text in (first_text, second_text)
        )
        # Readings first, then forms: the first reason found is the weightiest.
        if reason := explain(first_reading, second_reading):
            return reason
        if literals(first_text) != literals(second_text):
            return "symbols, case or layout differ"
        return "punctuation differs" if _punctuated(first_text, second_text) else ""

    def _root(self, word: str) -> str:
        seen: list[str] = []
        while word in self._synonyms and word not in seen:
            seen.append(word)
            word = self._synonyms[word]

        # A circle of synonyms has no end: all of its words stand for the least one.
        return min(seen) if word in seen else word


def explain(first: "QuestionReading", second: "QuestionReading") -> str:
    """Return the first difference of two readings in the order of weight; empty if they are equal.

    The texts' own words are never part of it, since they may be another caller's.
    """
    differences = {
        "negations differ": first.negations != second.negations,
        "numbers differ": first.numbers != second.numbers,
        "kinds of question differ": (first.kind, first.question) != (second.kind, second.question),
        "attributes asked for differ": (first.attribute, first.same)
        != (second.attribute, second.same),
        "content words differ": sorted(first.content) != sorted(second.content),
        "the order of content words differs": first.content != second.content,
        "verbs differ": first.verb != second.verb,
    }
    return next((reason for reason, differs in differences.items() if differs), "")


@dataclass(frozen=True)
class QuestionReading:
    """A question without its wording.

    Content words keep their order, since "is A left of B" is not "is B left of A". Articles, the
    wrapping ("can you tell me..."), the wording of existence and the light verbs of an attribute
    ("what color does it *have*") are left out.

    Attributes
    ----------
    kind : str
        what, who, where, when, why, count, how:<word>, yes/no, or other for a statement or command.
    verb : str
        Family and tense of the auxiliary: "is" and "was" ask about other times, "was hit" and "did
        hit" differ.
    attribute : str
        Attribute in question ("color"), if there is one.
    same : str
        "same" or "different" where the question compares two things by the attribute; else empty.
    content : tuple[str, ...]
        Content words in order, with synonyms replaced and numbers in digits.
    question : bool
        Whether the text ends in a question mark; only set where `kind` is other.
    """

    kind: str
    verb: str
    attribute: str
    same: str
    content: tuple[str, ...]
    question: bool = False

    @property
    def numbers(self) -> list[str]:
        """Numbers among the content words, sorted."""
        return sorted(word for word in self.content if word[0].isdigit())

    @property
    def negations(self) -> int:
        """Number of negations among the content words."""
        return sum(word in data.NEGATIONS for word in self.content)


def read(
    text: str, synonyms: Mapping[str, str] = data.SYNONYMS, phrases: Iterable[Phrase] = PHRASES
) -> QuestionReading:
    """Read a text, in about 70 microseconds.

    Case, white space and closing punctuation do not matter.

    Examples
    --------
    >>> read("Can you tell me the color of the box?") == read("What color does the cube have?")
    True
    >>> read("Is the ball left of the ring?") == read("Is the ring left of the ball?")
    False
    """
    plain = bare = _contractions(_folded(text))
    for frame in _FRAMES:
        plain = frame.sub("", plain).strip()

    framed = plain != bare
    if framed:
        plain = _IF.sub("verify", plain)

    plain = _WHICH.sub("what", plain)

    for pattern, wording in phrases:
        changed, times = pattern.subn(wording, plain)
        if times:
            plain = " ".join(changed.split())

    tokens = [_canonical(token, synonyms) for token in _TOKEN.findall(plain)]
    return _read(tokens, framed, text.rstrip().endswith(("?", "？")))


def _read(tokens: list[str], framed: bool, question: bool) -> QuestionReading:
    kind, tokens = _kind(tokens, framed)

    auxiliary = next((i for i, t in enumerate(tokens) if t in _BE or t in _DO), None)
    verb, past = "be", False
    if auxiliary is not None:
        verb = "do" if tokens[auxiliary] in _DO else "be"
        past = tokens[auxiliary] in _PAST

        # "Do" only carries the tense; the verb itself stays as a content word.
        if verb == "do":
            del tokens[auxiliary]

    tokens = [t for t in tokens if t not in _BE]
    kind, tokens, attribute = _take_attribute(kind, tokens)

    same = next((t for t in tokens if t in ("same", "different")), "") if attribute else ""

    light = {"have", "has", "drawn"} if attribute else set[str]()
    if attribute and "drawn" in tokens:
        light |= {"in"}

    if same:
        light |= {same, *_LINKS}
    # "Lies left of" and "is left of" are one relation.
    if not _SPATIAL.isdisjoint(tokens):
        light |= {"lie", "lies", "found"}

    # A light verb says nothing: "what color does it have" and "is" ask the same.
    if any(t in light for t in tokens):
        verb = "be"

    content = tuple(
        t for i, t in enumerate(tokens) if t not in light and not _is_article(tokens, i)
    )
    return QuestionReading(
        kind,
        f"{verb} past" if past else verb,
        attribute,
        same,
        content,
        question and kind == "other",
    )


def _is_article(tokens: list[str], place: int) -> bool:
    """Return whether a token is an article or "of".

    An "a" that no word follows is a name, as in "from A to B".
    """
    if tokens[place] != "a":
        return tokens[place] in _DROPPED
    after = tokens[place + 1] if place + 1 < len(tokens) else ""
    return len(after) > 1 and after[0].isalpha() and after not in _NO_NOUNS


def _kind(tokens: list[str], framed: bool) -> tuple[str, list[str]]:
    """Return the kind of question, and the tokens without those that showed it."""
    if not tokens:
        return "other", tokens
    if tokens[0] in ("exist", "verify"):
        return "yes/no", [t for t in tokens if t not in ("exist", "verify")]
    if (
        tokens[0] in _BE
        or tokens[0] in _DO
        or tokens[0] in _MODAL
        or tokens[0] in ("has", "have", "had")
    ):
        return "yes/no", tokens

    place = next((i for i, t in enumerate(tokens) if t in _WH), None)
    # "Tell me the color" asks what it is, "tell me a joke" asks for one.
    if place is None and framed:
        return ("what" if tokens[0] == "the" else "tell"), tokens
    # Inside a sentence these words are conjunctions.
    if place is None or (tokens[place] in ("when", "where", "how", "who") and place > 1):
        return ("tell" if framed else "other"), tokens

    word, before, after = tokens[place], tokens[:place], tokens[place + 1 :]
    if word == "how" and after and after[0] not in _BE | _DO | _MODAL:
        return _how(after[0], before, after[1:])
    # "What city ... in" is "in what city ...".
    if word == "what" and not before and after and after[-1] == "in":
        before, after = ["in"], after[:-1]
    # "I know what..." asks nothing.
    if before and before != ["in"] and before[-1] not in _BE:
        word = f"other {word}"
    return word, before + after


def _how(word: str, before: list[str], after: list[str]) -> tuple[str, list[str]]:
    if word == "many":
        return "count", before + after
    if word in data.MEASURES:
        return "what", [*before, data.MEASURES[word], *after]
    return f"how:{word}", before + after


def _take_attribute(kind: str, tokens: list[str]) -> tuple[str, list[str], str]:
    """Remove the attribute that is asked for (or compared), which may stand anywhere."""
    if kind == "yes/no":
        if "or" in tokens:
            place = tokens.index("or")
            pair = frozenset(tokens[max(0, place - 1) : place] + tokens[place + 1 : place + 2])
            for name, values in data.VALUES.items():
                if len(pair) == 2 and pair <= values:
                    return "what", tokens[: place - 1] + tokens[place + 2 :], name
        if not {"same", "different"} & set(tokens):
            return kind, tokens, ""
    elif kind != "what":
        return kind, tokens, ""

    attribute = next((t for t in tokens if t in data.ATTRIBUTES), "")
    if not attribute:
        return kind, tokens, ""

    rest = [t for t in tokens if t != attribute]
    # Twice: which of them is asked for is not plain.
    if kind == "what" and len(tokens) - len(rest) > 1:
        return kind, tokens, ""
    return kind, [t for t in rest if t != "'s"], attribute


def _folded(text: str) -> str:
    """Return the text in Unicode NFKC and lower case, without closing marks.

    White space is collapsed.
    """
    folded = text
    # Folding may undo NFKC, and NFKC folding, for a few letters: until nothing changes.
    while True:
        again = " ".join(unicodedata.normalize("NFKC", folded.casefold()).split())
        if again == folded:
            return folded.rstrip(_CLOSING) or folded
        folded = again


def _punctuated(first_text: str, second_text: str) -> bool:
    """Return whether two texts have the same words and other marks between them.

    "Eat, Ann" is not "eat Ann".
    """
    first_folded, second_folded = (
        _folded(text).translate(_STRAIGHT) for text in (first_text, second_text)
    )

    same_words = re.findall(r"\w+", first_folded) == re.findall(r"\w+", second_folded)
    # White space apart: it is judged with the layout, by `literals`.
    return same_words and "".join(first_folded.split()) != "".join(second_folded.split())


def _contractions(text: str) -> str:
    text = text.replace("’", "'").replace("‘", "'").replace("cannot", "can not")
    if "'" in text:
        for pattern, wording in _CONTRACTIONS:
            text = pattern.sub(wording, text)
    return text


def _canonical(token: str, synonyms: Mapping[str, str]) -> str:
    if token == "possessive":
        return "'s"
    if token[0].isdigit():
        # No zero is dropped: version 3.10 is not 3.1, agent 007 is not 7.
        return _THOUSANDS.sub("", token)
    token = data.NUMBERS.get(token, token)
    if token in synonyms:
        return synonyms[token]

    singular = _singular(token)
    if singular in synonyms:
        word = synonyms[singular]
        return word if len(word) <= 3 and word in UNITS else f"{word}+s"
    # Singular and plural stay apart: "a cube" and "cubes" are other questions.
    return f"{singular}+s" if singular != token and singular in synonyms.values() else token


UNITS = frozenset("kg g mg km m cm mm l ml h min sec % $ € £".split())


def _singular(token: str) -> str:
    if token.endswith(("xes", "sses", "shes", "ches", "uses")):
        return token[:-2]
    return token[:-1] if token.endswith("s") and not token.endswith(_ENDING_S) else token
