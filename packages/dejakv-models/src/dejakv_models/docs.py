"""Documents of facts, questions about them, and changed versions: the data of docs-lm."""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError
from dejakv_models.docs_facts import ATTRIBUTES, FILLERS, NAMES, OPENINGS

CONTEXT = 2048
"""Tokens that docs-lm reads: prompt and answer together."""
RESERVED = 32
"""Of these, kept for the markers, the question and the answer."""

Wordings = Literal["train", "held_out"]
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Fact:
    """The statement that `name`'s `attribute` is `value`.

    All are as docs-lm's tokenizer spells them: lower case, one token each.
    """

    name: str
    attribute: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        """Subject of the fact; a document states each key once."""
        return (self.name, self.attribute)


@dataclass(frozen=True)
class Sentence:
    """One sentence, the fact it states (None for filler) and the wording it was made from."""

    text: str
    fact: Fact | None
    wording: str


@dataclass(frozen=True)
class Document:
    """Sentences in order.

    `make_document` builds a document, and the changes in `docs` derive others from it.
    """

    sentences: tuple[Sentence, ...]

    @cached_property
    def text(self) -> str:
        """The sentences as one text."""
        return " ".join(s.text for s in self.sentences)

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Every fact, in the order of the document."""
        return tuple(s.fact for s in self.sentences if s.fact is not None)

    @cached_property
    def tokens(self) -> int:
        """Length in docs-lm's tokens (words and punctuation marks), not of markers and question."""
        return count_tokens(self.text)

    @cached_property
    def id(self) -> str:
        """First 16 hexadecimal digits of the text's SHA-256, a name of the text everywhere."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def answer(self, name: str, attribute: str) -> str | None:
        """Return the value the document states for this key, or None."""
        return next((f.value for f in self.facts if f.key == (name, attribute)), None)


def count_tokens(text: str) -> int:
    """Count docs-lm's tokens in a text of the closed vocabulary, without loading a tokenizer."""
    return len(_WORD.findall(text))


def check_length(document: Document) -> Document:
    """Return the document itself.

    Raises
    ------
    DatasetError
        If it and a question do not fit docs-lm's context.
    """
    limit = CONTEXT - RESERVED
    if document.tokens > limit:
        fits = len(document.facts) * limit // document.tokens
        raise DatasetError(
            f"the document has {document.tokens} tokens, but docs-lm reads {CONTEXT} of which"
            f" {RESERVED} are kept for question and answer: ask for at most about {fits} facts, or"
            " less filler"
        )
    return document


def _proper(word: str, attribute: str) -> str:
    return word.capitalize() if attribute in ("home", "birthplace") else word


def state(
    fact: Fact,
    rng: random.Random,
    wordings: Wordings = "train",
    avoid: str = "",
    opening: float = 0.1,
) -> Sentence:
    """State the fact in a randomly chosen wording other than `avoid`.

    With probability `opening` it follows an opening phrase.
    """
    of = ATTRIBUTES[fact.attribute]
    known = of.statements if wordings == "train" else of.held_out_statements
    template = rng.choice([wording for wording in known if wording != avoid])
    text = template.format(n=fact.name.capitalize(), v=_proper(fact.value, fact.attribute))
    if rng.random() < opening:
        body = text if text.startswith(fact.name.capitalize()) else text[0].lower() + text[1:]
        text = f"{rng.choice(OPENINGS)} {body}"
    return Sentence(text, fact, template)


def filler(rng: random.Random) -> Sentence:
    """Return a sentence that states no fact but may name people."""
    template = rng.choice(FILLERS)
    n, m = rng.sample(NAMES, 2)
    return Sentence(template.format(n=n.capitalize(), m=m.capitalize()), None, template)


def ask(fact: Fact, rng: random.Random, wordings: Wordings = "train") -> str:
    """Return a question whose answer is the fact's value."""
    of = ATTRIBUTES[fact.attribute]
    template = rng.choice(of.questions if wordings == "train" else of.held_out_questions)
    return template.format(n=fact.name.capitalize())


def draw_facts(
    rng: random.Random, count: int, taken: frozenset[tuple[str, str]] = frozenset()
) -> list[Fact]:
    """Draw `count` facts with different keys, none of them in `taken`.

    They are about a random number of people, so that neither the name nor the attribute alone
    identifies a fact.

    Raises
    ------
    DatasetError
        If there are too few.
    """
    possible = len(NAMES) * len(ATTRIBUTES) - len(taken)
    if not 1 <= count <= possible:
        raise DatasetError(
            f"{count} facts were asked for, but between 1 and {possible} different ones can be"
            " stated"
        )
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
    """Make a document that states some facts and, now and then, something else.

    Parameters
    ----------
    rng : random.Random
        Source of chance.
    facts : int
        Facts to state, about 8 tokens each.
    filler_share : float
        Probability of a filler sentence before each fact.
    wordings : {"train", "held_out"}
        `held_out` uses the wordings that docs-lm never saw in training.
    """
    sentences: list[Sentence] = []
    for fact in draw_facts(rng, facts):
        if rng.random() < filler_share:
            sentences.append(filler(rng))
        sentences.append(state(fact, rng, wordings))
    return check_length(Document(tuple(sentences)))


Kind = Literal["paraphrase", "reorder", "edit", "extend", "merge", "unrelated"]
KINDS: tuple[Kind, ...] = ("paraphrase", "reorder", "edit", "extend", "merge", "unrelated")


@dataclass(frozen=True)
class ChangeQuestion:
    """Question about a change's target.

    Attributes
    ----------
    text : str
        The question.
    answer : str
        The answer in the target.
    old_answer : str or None
        The answer in the donor; None if the donor has none.
    must_change : bool
        Whether the donor's answer is wrong for the target: answering `old_answer` is a stale
        answer.
    fact : Fact
        The fact that is asked for.
    """

    text: str
    answer: str
    old_answer: str | None
    must_change: bool
    fact: Fact


@dataclass(frozen=True)
class Change:
    """Two documents, of which `target` is `donor` after the change.

    Attributes
    ----------
    kind : Kind
        The kind of change.
    donor, target : Document
        The documents.
    questions : tuple[ChangeQuestion, ...]
        Questions about the target.
    changed : tuple[Fact, ...]
        Facts of the target that the donor states differently or not at all.
    """

    kind: Kind
    donor: Document
    target: Document
    questions: tuple[ChangeQuestion, ...]
    changed: tuple[Fact, ...] = ()


def _change(
    kind: Kind, donor: Document, target: Document, rng: random.Random, questions: int | None
) -> Change:
    """Ask about changed facts first, then about others; None asks about every fact."""
    check_length(target)
    changed = [f for f in target.facts if donor.answer(*f.key) != f.value]
    same = [f for f in target.facts if donor.answer(*f.key) == f.value]
    count = len(target.facts) if questions is None else questions
    if count < 1:
        raise DatasetError(
            f"a change needs at least one question, not {questions}: give a positive number or None"
        )
    rng.shuffle(changed)
    # Half the questions are about changed facts, so that a change also shows whether the rest
    # survived it.
    first = changed[: max(1, (count + 1) // 2, count - len(same))]
    asked = first + rng.sample(same, min(len(same), count - len(first)))
    made = tuple(_question(f, donor.answer(*f.key), rng) for f in asked)
    return Change(
        kind, donor, target, made, tuple(f for f in target.facts if donor.answer(*f.key) != f.value)
    )


def _question(fact: Fact, old: str | None, rng: random.Random) -> ChangeQuestion:
    return ChangeQuestion(ask(fact, rng), fact.value, old, old != fact.value, fact)


def paraphrase(
    doc: Document,
    rng: random.Random,
    *,
    share: float = 1.0,
    wordings: Wordings = "train",
    questions: int | None = 6,
) -> Change:
    """Put the same facts in the same order into other wordings.

    Each sentence changes with probability `share`, and every answer stays.
    """
    sentences = tuple(
        state(s.fact, rng, wordings, avoid=s.wording) if s.fact and rng.random() < share else s
        for s in doc.sentences
    )
    return _change("paraphrase", doc, Document(sentences), rng, questions)


def reorder(doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """Put the same sentences into another order; every answer stays.

    Raises
    ------
    DatasetError
        For a document of one sentence.
    """
    if len(set(doc.sentences)) < 2:
        raise DatasetError(
            "a document of one sentence has no other order: make it of at least 2 facts"
        )
    order = list(doc.sentences)
    while tuple(order) == doc.sentences:
        rng.shuffle(order)
    return _change("reorder", doc, Document(tuple(order)), rng, questions)


def edit(doc: Document, rng: random.Random, *, facts: int = 1, questions: int | None = 6) -> Change:
    """Give `facts` of the document's facts another value, in the same wording: one token each.

    Those answers must change.
    """
    if not 1 <= facts <= len(doc.facts):
        raise DatasetError(
            f"{facts} facts cannot be edited in a document of {len(doc.facts)}: give 1 to"
            f" {len(doc.facts)}"
        )
    chosen = {f.key for f in rng.sample(doc.facts, facts)}
    sentences = tuple(
        _edited(s, rng) if s.fact and s.fact.key in chosen else s for s in doc.sentences
    )
    return _change("edit", doc, Document(sentences), rng, questions)


def _edited(sentence: Sentence, rng: random.Random) -> Sentence:
    fact = sentence.fact
    assert fact is not None
    value = rng.choice([v for v in ATTRIBUTES[fact.attribute].values if v != fact.value])
    head, old, tail = _cut_at_value(sentence.text, fact)
    new = value.capitalize() if old[0].isupper() else value
    return replace(sentence, text=head + new + tail, fact=replace(fact, value=value))


def _cut_at_value(text: str, fact: Fact) -> tuple[str, str, str]:
    """Return the text before, at and after the value.

    It is the value's last occurrence as a word, since names and cues come before it.
    """
    words = text.split(" ")
    at = max(i for i, w in enumerate(words) if w.strip(".,").lower() == fact.value)
    start = sum(len(w) + 1 for w in words[:at])
    return text[:start], text[start : start + len(fact.value)], text[start + len(fact.value) :]


def extend(
    doc: Document,
    rng: random.Random,
    *,
    facts: int = 4,
    where: Literal["end", "start", "inside"] = "end",
    questions: int | None = 6,
) -> Change:
    """Add `facts` new facts.

    Old answers stay; questions about the new ones have no old answer.
    """
    new = [state(f, rng) for f in draw_facts(rng, facts, frozenset(f.key for f in doc.facts))]
    old = list(doc.sentences)
    if where == "inside":
        for sentence in new:
            old.insert(rng.randrange(len(old) + 1), sentence)
        sentences = old
    else:
        sentences = old + new if where == "end" else new + old
    return _change("extend", doc, Document(tuple(sentences)), rng, questions)


def merge(
    doc: Document, rng: random.Random, *, other: Document | None = None, questions: int | None = 6
) -> Change:
    """Put another document before this one, so that every token of the donor moves.

    The other document has as many new facts, unless it is given.

    Raises
    ------
    DatasetError
        If `other` states a fact about something that this document states too.
    """
    taken = frozenset(f.key for f in doc.facts)
    if other is None:
        other = Document(tuple(state(f, rng) for f in draw_facts(rng, len(doc.facts), taken)))
    clash = [f.key for f in other.facts if f.key in taken]
    if clash:
        raise DatasetError(
            f"both documents state {clash[0]}: merge documents about different things"
        )
    return _change("merge", doc, Document(other.sentences + doc.sentences), rng, questions)


def unrelated(doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """Make a new document of as many facts about other things; no fact of the donor holds."""
    taken = frozenset(f.key for f in doc.facts)
    sentences: Sequence[Sentence] = [state(f, rng) for f in draw_facts(rng, len(doc.facts), taken)]
    mixed = [x for s in sentences for x in ((filler(rng), s) if rng.random() < 0.15 else (s,))]
    return _change("unrelated", doc, Document(tuple(mixed)), rng, questions)


def change(kind: Kind, doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """Make the named change with its defaults (edit: a fifth of the facts).

    Raises
    ------
    DatasetError
        For an unknown kind.
    """
    if kind not in KINDS:
        raise DatasetError(f"unknown change {kind!r}: choose one of {', '.join(KINDS)}")
    if kind == "edit":
        return edit(doc, rng, facts=max(1, len(doc.facts) // 5), questions=questions)
    made = {
        "paraphrase": paraphrase,
        "reorder": reorder,
        "extend": extend,
        "merge": merge,
        "unrelated": unrelated,
    }
    return made[kind](doc, rng, questions=questions)


BOS, QUESTION, ANSWER, EOS = "<s>", "<q>", "<a>", "</s>"


def prompt_of(context: str, question: str) -> str:
    """Return the prompt of docs-lm, with its markers; its tokenizer adds none.

    The answer and </s> follow.
    """
    return f"{BOS} {context} {QUESTION} {question} {ANSWER}"


def prompt(sample: Sample) -> str:
    """Return `prompt_of` of a sample's context and question.

    It is the text that the chat template renders from a system message (the document) and a user
    message (the question).
    """
    return prompt_of(sample.context, sample.question)


def sample_of(
    document: Document,
    question: str,
    fact: Fact,
    number: int,
    repeats: str = "new",
    source: str = "",
) -> Sample:
    """Return one record as a sample.

    Its fields give the fact that is asked for and the relation of the document to an earlier one
    (`source`).
    """
    return Sample(
        id=f"docs-{number}",
        question=question,
        answer=fact.value,
        context=document.text,
        fields={
            "documentId": document.id,
            "name": fact.name,
            "attribute": fact.attribute,
            "relation": repeats,
            "sourceId": source,
        },
    )


@dataclass(frozen=True)
class DocsDataset:
    """Questions about documents that are all different.

    There are `samples` questions, `per_document` of them after each new document of `facts` facts.
    Iterating twice gives the same samples; another seed gives others.
    """

    seed: int = 0
    samples: int = 100
    facts: int = 16
    per_document: int = 4
    wordings: Wordings = "train"
    filler_share: float = 0.15
    name: str = "docs"

    def __len__(self) -> int:
        return self.samples

    def documents(self) -> Iterator[Document]:
        """Yield documents without end, in the order in which the samples use them."""
        number = 0
        while True:
            rng = random.Random(f"docs/{self.seed}/{number}")
            yield make_document(
                rng, self.facts, filler_share=self.filler_share, wordings=self.wordings
            )
            number += 1

    def __iter__(self) -> Iterator[Sample]:
        rng = random.Random(f"docs/{self.seed}/questions")
        made = 0
        for document in self.documents():
            for fact in rng.sample(document.facts, min(self.per_document, len(document.facts))):
                if made == self.samples:
                    return
                yield sample_of(document, ask(fact, rng, self.wordings), fact, made)
                made += 1
            if made == self.samples:
                return


@dataclass(frozen=True)
class DocsStream:
    """Questions with natural repetition: a few documents are asked about again and again.

    The n-th most popular of `documents` documents has weight 1/n**zipf. With probability `repeat`
    an earlier question of that document repeats word for word; with `vary` the document is changed
    (paraphrase, reorder, edit, extend, merge). A sample's field `relation` says which: new,
    same_document, repeat, or the kind of change. Its field `mustChange` tells that the answer from
    the source document would be wrong.
    """

    seed: int = 0
    samples: int = 100
    facts: int = 16
    documents: int = 20
    zipf: float = 1.0
    repeat: float = 0.3
    vary: float = 0.3
    name: str = "docs-stream"

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Sample]:
        rng = random.Random(f"docs-stream/{self.seed}")
        docs = [make_document(rng, self.facts) for _ in range(self.documents)]
        weights = [1 / (i + 1) ** self.zipf for i in range(len(docs))]
        asked: dict[str, list[tuple[str, Fact]]] = {}
        kinds: tuple[Kind, ...] = ("paraphrase", "reorder", "edit", "extend", "merge")
        for number in range(self.samples):
            doc = rng.choices(docs, weights)[0]
            draw, past = rng.random(), asked.get(doc.id)
            if past and draw < self.repeat:
                question, fact = rng.choice(past)
                yield sample_of(doc, question, fact, number, "repeat", doc.id)
            elif past and draw < self.repeat + self.vary:
                made = change(rng.choice(kinds), doc, rng, questions=2)
                yield _varied(made.kind, doc, made.target, rng.choice(made.questions), number)
            else:
                fact = rng.choice(doc.facts)
                question = ask(fact, rng)
                asked.setdefault(doc.id, []).append((question, fact))
                yield sample_of(
                    doc,
                    question,
                    fact,
                    number,
                    "same_document" if past else "new",
                    doc.id if past else "",
                )


def _varied(
    kind: Kind, source: Document, target: Document, question: ChangeQuestion, number: int
) -> Sample:
    made = sample_of(target, question.text, question.fact, number, kind, source.id)
    fields = {**made.fields, "mustChange": question.must_change, "oldAnswer": question.old_answer}
    return Sample(made.id, made.question, made.answer, context=made.context, fields=fields)


def dataset(seed: int, samples: int | None) -> DocsStream:
    """Return the data set of `--dataset docs`: 200 samples unless said otherwise.

    A document has about 640 tokens: enough for a prefill to cost more than a lookup.
    """
    return DocsStream(seed=seed, samples=samples or 200, facts=64)
