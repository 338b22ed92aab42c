"""Six ways in which one document becomes another, each with the answers that must stay and those that must change."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dejakv.datasets.docs_document import (
    Document,
    Fact,
    Sentence,
    Wordings,
    ask,
    check_length,
    draw_facts,
    filler,
    make_document,
    state,
)
from dejakv.datasets.docs_facts import ATTRIBUTES
from dejakv.errors import DatasetError

Kind = Literal["paraphrase", "reorder", "edit", "extend", "merge", "unrelated"]
KINDS: tuple[Kind, ...] = ("paraphrase", "reorder", "edit", "extend", "merge", "unrelated")


@dataclass(frozen=True)
class Question:
    """A question about a change's target.

    answer       the answer in the target
    old_answer   the answer in the donor; None if the donor has none
    must_change  the donor's answer is wrong for the target: answering `old_answer` is a stale answer
    """

    text: str
    answer: str
    old_answer: str | None
    must_change: bool
    fact: Fact


@dataclass(frozen=True)
class Change:
    """`target` is `donor` after the change. `changed`: the facts of the target that the donor states differently or not at all."""

    kind: Kind
    donor: Document
    target: Document
    questions: tuple[Question, ...]
    changed: tuple[Fact, ...] = ()

    @property
    def must_stay(self) -> tuple[Question, ...]:
        return tuple(q for q in self.questions if not q.must_change)

    @property
    def must_change(self) -> tuple[Question, ...]:
        return tuple(q for q in self.questions if q.must_change)


def _change(kind: Kind, donor: Document, target: Document, rng: random.Random, questions: int | None) -> Change:
    """Ask about changed facts first, then about others; None asks about every fact of the target."""
    check_length(target)
    changed = [f for f in target.facts if donor.answer(*f.key) != f.value]
    same = [f for f in target.facts if donor.answer(*f.key) == f.value]
    count = len(target.facts) if questions is None else questions
    if count < 1:
        raise DatasetError(f"a change needs at least one question, not {questions}: give a positive number or None")
    rng.shuffle(changed)
    # Half the questions are about changed facts, so that a change also shows whether the rest survived it.
    first = changed[: max(1, (count + 1) // 2, count - len(same))]
    asked = first + rng.sample(same, min(len(same), count - len(first)))
    made = tuple(_question(f, donor.answer(*f.key), rng) for f in asked)
    return Change(kind, donor, target, made, tuple(f for f in target.facts if donor.answer(*f.key) != f.value))


def _question(fact: Fact, old: str | None, rng: random.Random) -> Question:
    return Question(ask(fact, rng), fact.value, old, old != fact.value, fact)


def paraphrase(
    doc: Document,
    rng: random.Random,
    *,
    share: float = 1.0,
    wordings: Wordings = "train",
    questions: int | None = 6,
) -> Change:
    """The same facts in the same order, each sentence (with probability `share`) in another wording. Every answer stays."""
    sentences = tuple(
        state(s.fact, rng, wordings, avoid=s.wording) if s.fact and rng.random() < share else s for s in doc.sentences
    )
    return _change("paraphrase", doc, Document(sentences), rng, questions)


def reorder(doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """The same sentences in another order. Every answer stays. DatasetError for a document of one sentence."""
    if len(set(doc.sentences)) < 2:
        raise DatasetError("a document of one sentence has no other order: make it of at least 2 facts")
    order = list(doc.sentences)
    while tuple(order) == doc.sentences:
        rng.shuffle(order)
    return _change("reorder", doc, Document(tuple(order)), rng, questions)


def edit(doc: Document, rng: random.Random, *, facts: int = 1, questions: int | None = 6) -> Change:
    """`facts` of the document's facts get another value, in the same wording: one token each. Those answers must change."""
    if not 1 <= facts <= len(doc.facts):
        raise DatasetError(
            f"{facts} facts cannot be edited in a document of {len(doc.facts)}: give 1 to {len(doc.facts)}"
        )
    chosen = {f.key for f in rng.sample(doc.facts, facts)}
    sentences = tuple(_edited(s, rng) if s.fact and s.fact.key in chosen else s for s in doc.sentences)
    return _change("edit", doc, Document(sentences), rng, questions)


def _edited(sentence: Sentence, rng: random.Random) -> Sentence:
    fact = sentence.fact
    assert fact is not None
    value = rng.choice([v for v in ATTRIBUTES[fact.attribute].values if v != fact.value])
    head, old, tail = _cut_at_value(sentence.text, fact)
    new = value.capitalize() if old[0].isupper() else value
    return replace(sentence, text=head + new + tail, fact=replace(fact, value=value))


def _cut_at_value(text: str, fact: Fact) -> tuple[str, str, str]:
    """Text before, at and after the value: its last occurrence as a word, since names and cues come before it."""
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
    """`facts` new facts are added. Old answers stay; questions about the new ones have no old answer."""
    new = [state(f, rng) for f in draw_facts(rng, facts, frozenset(f.key for f in doc.facts))]
    old = list(doc.sentences)
    if where == "inside":
        for sentence in new:
            old.insert(rng.randrange(len(old) + 1), sentence)
        sentences = old
    else:
        sentences = old + new if where == "end" else new + old
    return _change("extend", doc, Document(tuple(sentences)), rng, questions)


def merge(doc: Document, rng: random.Random, *, other: Document | None = None, questions: int | None = 6) -> Change:
    """Another document (of as many new facts, unless given), then this one: every token of the donor has moved.

    DatasetError if `other` states a fact about something that this document states too.
    """
    taken = frozenset(f.key for f in doc.facts)
    if other is None:
        other = Document(tuple(state(f, rng) for f in draw_facts(rng, len(doc.facts), taken)))
    clash = [f.key for f in other.facts if f.key in taken]
    if clash:
        raise DatasetError(f"both documents state {clash[0]}: merge documents about different things")
    return _change("merge", doc, Document(other.sentences + doc.sentences), rng, questions)


def unrelated(doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """A new document of as many facts about other things. No fact of the donor holds."""
    taken = frozenset(f.key for f in doc.facts)
    sentences: Sequence[Sentence] = [state(f, rng) for f in draw_facts(rng, len(doc.facts), taken)]
    mixed = [x for s in sentences for x in ((filler(rng), s) if rng.random() < 0.15 else (s,))]
    return _change("unrelated", doc, Document(tuple(mixed)), rng, questions)


def change(kind: Kind, doc: Document, rng: random.Random, *, questions: int | None = 6) -> Change:
    """The named change with its defaults (edit: a fifth of the facts). DatasetError for an unknown kind."""
    match kind:
        case "paraphrase":
            return paraphrase(doc, rng, questions=questions)
        case "reorder":
            return reorder(doc, rng, questions=questions)
        case "edit":
            return edit(doc, rng, facts=max(1, len(doc.facts) // 5), questions=questions)
        case "extend":
            return extend(doc, rng, questions=questions)
        case "merge":
            return merge(doc, rng, questions=questions)
        case "unrelated":
            return unrelated(doc, rng, questions=questions)
        case _:
            raise DatasetError(f"unknown change {kind!r}: choose one of {', '.join(KINDS)}")


__all__ = [
    "KINDS",
    "Change",
    "Kind",
    "Question",
    "change",
    "edit",
    "extend",
    "make_document",
    "merge",
    "paraphrase",
    "reorder",
    "unrelated",
]
