"""A veto on wording: whatever an embedding says, other content words, numbers, polarity or another kind of question is another question.

"Turn on" and "turn off" score .915 in an embedding where a real paraphrase scores .673: no threshold separates them. A `QuestionReading` is what a
text asks, as far as its words show it; two texts with equal readings ask the same.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dejakv.decide.guards import words as data
from dejakv.decide.guards.base import Guard, Verdict
from dejakv.decide.levels.base import Match
from dejakv.decide.literals import literals
from dejakv.errors import ConfigError
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

QUESTION = "question"
"""Entry of a chunk's `metadata`: `Request.question`."""

Phrase = tuple[re.Pattern[str], str]

PHRASES: tuple[Phrase, ...] = tuple((re.compile(pattern), wording) for pattern, wording in data.PHRASES)
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
# Numbers, words, and every other mark but those of ordinary prose: "☂" is not "☀", "2*(3+4)" is not "(2*3)+4".
_TOKEN = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:[-'][^\W\d_]+)*|[^\w\s.,;:!?'\"…。？！、，：；“”«»]")
_BE = frozenset("is are am was were be been being".split())
_DO = frozenset("do does did".split())
_MODAL = frozenset("can could will would shall should may might must".split())
_PAST = frozenset("was were did".split())
_WH = frozenset("what who whose where when why how".split())
_DROPPED = frozenset(("the", "an", "of"))
_NO_NOUNS = frozenset(
    "to from or and right wrong correct left above below in on at by for with than as of the not".split()
)
_SPATIAL = frozenset("left right above below".split())
_LINKS = frozenset("and with as".split())
_ENDING_S = ("ss", "us", "is")


class LexicalGuard(Guard):
    """Accepts two texts with equal readings, rejects all others.

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
    'content words differ'
    """

    name = "lexical"
    waived_for_blend = True  # it recomputes what differs, so words may differ

    def __init__(
        self,
        synonyms: Mapping[str, str] | None = None,
        phrases: Iterable[tuple[str, str]] = (),
        *,
        vocabulary: Mapping[str, str] = data.SYNONYMS,
    ) -> None:
        try:
            self._phrases = (*((re.compile(pattern), wording) for pattern, wording in phrases), *PHRASES)
        except re.error as error:
            raise ConfigError(f"a phrase of the lexical guard is no regular expression: {error}") from error
        self._synonyms = {**vocabulary, **(synonyms or {})}
        for word in self._synonyms:  # a chain of synonyms ends at one word
            self._synonyms[word] = self._root(word)

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        """Accept a donor with the same question, by `difference`, and reject others. Chunks are compared where one of the two has no
        question."""
        donor_question = donor.metadata.get(QUESTION)
        if request.question and isinstance(donor_question, str):
            reason = self.difference(request.question, donor_question)
        else:
            reason = self.difference(request.chunk, donor.chunk)
        if reason:
            return Verdict("reject", self.name, reason)
        return Verdict("accept", self.name, "same content words, numbers, polarity and kind of question")

    def difference(self, first_text: str, second_text: str) -> str:
        """Why two texts are different questions, or "". Symmetric.

        Their readings differ (see `explain`), or what carries meaning by its form (see `dejakv.decide.literals`), or, where
        the words are the same, the marks between them.
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
    """The first difference in the order of weight; empty if the readings are equal. Never in the texts' own words, which may be another
    caller's."""
    differences = {
        "negations differ": first.negations != second.negations,
        "numbers differ": first.numbers != second.numbers,
        "kinds of question differ": (first.kind, first.question) != (second.kind, second.question),
        "attributes asked for differ": (first.asked, first.same) != (second.asked, second.same),
        "content words differ": sorted(first.content) != sorted(second.content),
        "the order of content words differs": first.content != second.content,
        "verbs differ": first.verb != second.verb,
    }
    return next((reason for reason, differs in differences.items() if differs), "")


@dataclass(frozen=True)
class QuestionReading:
    """A question without its wording. Content words keep their order: "is A left of B" is not "is B left of A". Left out are articles, the
    wrapping ("can you tell me..."), the wording of existence and the light verbs of an attribute ("what color does it *have*").

    kind      what, who, where, when, why, count, how:<word>, yes/no, or other (a statement or command)
    verb      the auxiliary's family and tense: "is" and "was" ask about other times, "was hit" and "did hit" differ
    asked     the attribute in question ("color"), if there is one
    same      whether it is about being the same or different, where the two things may stand in either construction
    content   the content words in order: synonyms replaced, numbers in digits
    question  it ends in a question mark; only kept where the kind is "other"
    """

    kind: str
    verb: str
    asked: str
    same: str
    content: tuple[str, ...]
    question: bool = False

    @property
    def numbers(self) -> list[str]:
        return sorted(word for word in self.content if word[0].isdigit())

    @property
    def negations(self) -> int:
        return sum(word in data.NEGATIONS for word in self.content)


def read(
    text: str, synonyms: Mapping[str, str] = data.SYNONYMS, phrases: Iterable[Phrase] = PHRASES
) -> QuestionReading:
    """The reading of a text. Case, white space and closing punctuation do not matter. About 70 microseconds.

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
    kind, tokens, attribute = _asked(kind, tokens)
    same = next((t for t in tokens if t in ("same", "different")), "") if attribute else ""

    light = {"have", "has", "drawn"} if attribute else set[str]()
    if attribute and "drawn" in tokens:
        light |= {"in"}
    if same:
        light |= {same, *_LINKS}
    if not _SPATIAL.isdisjoint(tokens):
        light |= {"lie", "lies", "found"}
    if any(t in light for t in tokens):
        verb = "be"
    content = tuple(t for i, t in enumerate(tokens) if t not in light and not _is_article(tokens, i))
    return QuestionReading(
        kind, f"{verb} past" if past else verb, attribute, same, content, question and kind == "other"
    )


def _is_article(tokens: list[str], place: int) -> bool:
    """Also "of". An "a" that no word follows is a name: "from A to B"."""
    if tokens[place] != "a":
        return tokens[place] in _DROPPED
    after = tokens[place + 1] if place + 1 < len(tokens) else ""
    return len(after) > 1 and after[0].isalpha() and after not in _NO_NOUNS


def _kind(tokens: list[str], framed: bool) -> tuple[str, list[str]]:
    """The kind of question, and the tokens without what said so."""
    if not tokens:
        return "other", tokens
    if tokens[0] in ("exist", "verify"):
        return "yes/no", [t for t in tokens if t not in ("exist", "verify")]
    if tokens[0] in _BE or tokens[0] in _DO or tokens[0] in _MODAL or tokens[0] in ("has", "have", "had"):
        return "yes/no", tokens

    place = next((i for i, t in enumerate(tokens) if t in _WH), None)
    if place is None and framed:  # "tell me the color" asks what it is, "tell me a joke" asks for one
        return ("what" if tokens[0] == "the" else "tell"), tokens
    if place is None or (tokens[place] in ("when", "where", "how", "who") and place > 1):  # a conjunction inside
        return ("tell" if framed else "other"), tokens

    word, before, after = tokens[place], tokens[:place], tokens[place + 1 :]
    if word == "how" and after and after[0] not in _BE | _DO | _MODAL:
        return _how(after[0], before, after[1:])
    if word == "what" and not before and after and after[-1] == "in":  # "what city ... in" is "in what city ..."
        before, after = ["in"], after[:-1]
    if before and before != ["in"] and before[-1] not in _BE:  # "I know what..." asks nothing
        word = f"other {word}"
    return word, before + after


def _how(word: str, before: list[str], after: list[str]) -> tuple[str, list[str]]:
    if word == "many":
        return "count", before + after
    if word in data.MEASURES:
        return "what", [*before, data.MEASURES[word], *after]
    return f"how:{word}", before + after


def _asked(kind: str, tokens: list[str]) -> tuple[str, list[str], str]:
    """Takes out the attribute that is asked for (or compared); it may stand anywhere."""
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
    if kind == "what" and len(tokens) - len(rest) > 1:  # twice: which of them is asked for is not plain
        return kind, tokens, ""
    return kind, [t for t in rest if t != "'s"], attribute


def _folded(text: str) -> str:
    """The text in Unicode NFKC and lower case, its white space collapsed, without closing marks."""
    folded = text
    while True:  # folding may undo NFKC (and the other way round) for a few letters: until nothing changes
        again = " ".join(unicodedata.normalize("NFKC", folded.casefold()).split())
        if again == folded:
            return folded.rstrip(_CLOSING) or folded
        folded = again


def _punctuated(first_text: str, second_text: str) -> bool:
    """Whether two texts have the same words and other marks between them: "eat, Ann" is not "eat Ann"."""
    first_folded, second_folded = (_folded(text).translate(_STRAIGHT) for text in (first_text, second_text))
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
        return _THOUSANDS.sub("", token)  # no zero is dropped: version 3.10 is not 3.1, agent 007 is not 7
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
