"""A document: sentences, most of which state one fact, and the questions that may be asked about it."""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dejakv.datasets.docs_facts import ATTRIBUTES, FILLERS, NAMES, OPENINGS, Attribute
from dejakv.errors import DatasetError

CONTEXT = 2048
"""Tokens that docs-lm reads: prompt and answer together."""
RESERVED = 32
"""Of these, kept for the markers, the question and the answer."""

Wordings = Literal["train", "held_out"]
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Fact:
    """`name`'s `attribute` is `value`, all as docs-lm's tokenizer spells them (lower case, one token each)."""

    name: str
    attribute: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        """The subject of the fact; a document states each key once."""
        return (self.name, self.attribute)


@dataclass(frozen=True)
class Sentence:
    """One sentence, the fact it states (None for filler) and the wording it was made from."""

    text: str
    fact: Fact | None
    wording: str


@dataclass(frozen=True)
class Document:
    """Sentences in order. `make_document` builds one; the changes in `docs` derive others from it."""

    sentences: tuple[Sentence, ...]

    @cached_property
    def text(self) -> str:
        return " ".join(s.text for s in self.sentences)

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Every fact, in the order of the document."""
        return tuple(s.fact for s in self.sentences if s.fact is not None)

    @cached_property
    def tokens(self) -> int:
        """Length in docs-lm's tokens (words and punctuation marks), markers and question not counted."""
        return count_tokens(self.text)

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of the text's SHA-256: the same text has the same id everywhere."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def answer(self, name: str, attribute: str) -> str | None:
        """The value the document states for this key, or None."""
        return next((f.value for f in self.facts if f.key == (name, attribute)), None)


def count_tokens(text: str) -> int:
    """docs-lm's tokens in a text of the closed vocabulary, without loading a tokenizer."""
    return len(_WORD.findall(text))


def check_length(document: Document) -> Document:
    """The document itself, or DatasetError if it and a question do not fit docs-lm's context."""
    limit = CONTEXT - RESERVED
    if document.tokens > limit:
        fits = len(document.facts) * limit // document.tokens
        raise DatasetError(
            f"the document has {document.tokens} tokens, but docs-lm reads {CONTEXT} of which {RESERVED} are kept for "
            f"question and answer: ask for at most about {fits} facts, or less filler"
        )
    return document


def statement_wordings(attribute: Attribute, wordings: Wordings) -> tuple[str, ...]:
    return attribute.statements if wordings == "train" else attribute.held_out_statements


def question_wordings(attribute: Attribute, wordings: Wordings) -> tuple[str, ...]:
    return attribute.questions if wordings == "train" else attribute.held_out_questions


def _proper(word: str, attribute: str) -> str:
    return word.capitalize() if attribute in ("home", "birthplace") else word


def state(
    fact: Fact, rng: random.Random, wordings: Wordings = "train", avoid: str = "", opening: float = 0.1
) -> Sentence:
    """The fact in a randomly chosen wording other than `avoid`; with probability `opening` after an opening phrase."""
    template = rng.choice([w for w in statement_wordings(ATTRIBUTES[fact.attribute], wordings) if w != avoid])
    text = template.format(n=fact.name.capitalize(), v=_proper(fact.value, fact.attribute))
    if rng.random() < opening:
        body = text if text.startswith(fact.name.capitalize()) else text[0].lower() + text[1:]
        text = f"{rng.choice(OPENINGS)} {body}"
    return Sentence(text, fact, template)


def filler(rng: random.Random) -> Sentence:
    """A sentence that states no fact but may name people."""
    template = rng.choice(FILLERS)
    n, m = rng.sample(NAMES, 2)
    return Sentence(template.format(n=n.capitalize(), m=m.capitalize()), None, template)


def ask(fact: Fact, rng: random.Random, wordings: Wordings = "train") -> str:
    """A question whose answer is the fact's value."""
    template = rng.choice(question_wordings(ATTRIBUTES[fact.attribute], wordings))
    return template.format(n=fact.name.capitalize())


def draw_facts(rng: random.Random, count: int, taken: frozenset[tuple[str, str]] = frozenset()) -> list[Fact]:
    """`count` facts with different keys, none of them in `taken`; DatasetError if there are too few.

    They are about a random number of people, so that neither the name nor the attribute alone identifies a fact.
    """
    possible = len(NAMES) * len(ATTRIBUTES) - len(taken)
    if not 1 <= count <= possible:
        raise DatasetError(f"{count} facts were asked for, but between 1 and {possible} different ones can be stated")
    names = rng.sample(NAMES, len(NAMES))
    fewest = -(-count // len(ATTRIBUTES))
    people = rng.randint(min(fewest, len(names)), max(fewest, min(count, len(names))))
    keys: list[tuple[str, str]] = []
    for at, name in enumerate(names):
        if at >= people and len(keys) >= count:
            break
        keys.extend((name, a) for a in ATTRIBUTES if (name, a) not in taken)
    return [Fact(n, a, rng.choice(ATTRIBUTES[a].values)) for n, a in rng.sample(keys, count)]


def make_document(
    rng: random.Random, facts: int = 16, *, filler_share: float = 0.15, wordings: Wordings = "train"
) -> Document:
    """A document that states `facts` facts (about 8 tokens each) and, now and then, something else.

    filler_share  probability of a filler sentence before each fact; DatasetError outside 0..1
    wordings      "held_out" uses the wordings that docs-lm never saw in training
    """
    if not 0.0 <= filler_share <= 1.0:
        raise DatasetError(f"filler_share is a probability, not {filler_share}: give a number from 0 to 1")
    sentences: list[Sentence] = []
    for fact in draw_facts(rng, facts):
        if rng.random() < filler_share:
            sentences.append(filler(rng))
        sentences.append(state(fact, rng, wordings))
    return check_length(Document(tuple(sentences)))
