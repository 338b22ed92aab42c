"""Samples from documents: a plain set, and a stream that repeats itself the way traffic does."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from dejakv.datasets.base import Sample
from dejakv.datasets.docs_changes import Kind, Question, change
from dejakv.datasets.docs_document import Document, Fact, Wordings, ask, make_document
from dejakv.errors import DatasetError

BOS, QUESTION, ANSWER, EOS = "<s>", "<q>", "<a>", "</s>"


def prompt_of(context: str, question: str) -> str:
    """The prompt of docs-lm, with its markers; its tokenizer adds none. The answer and </s> follow."""
    return f"{BOS} {context} {QUESTION} {question} {ANSWER}"


def prompt(sample: Sample) -> str:
    """`prompt_of` of a sample's context and question: the same text as the chat template renders from
    a system message (the document) and a user message (the question)."""
    return prompt_of(sample.context, sample.question)


def sample_of(
    document: Document, question: str, fact: Fact, number: int, repeats: str = "new", source: str = ""
) -> Sample:
    """One record. Its fields give the fact that is asked for and the relation of the document to an earlier one (`source`)."""
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
    """`samples` questions, `per_document` of them after each new document of `facts` facts.

    Iterating twice gives the same samples; another seed gives others.
    """

    seed: int = 0
    samples: int = 100
    facts: int = 16
    per_document: int = 4
    wordings: Wordings = "train"
    filler_share: float = 0.15
    name: str = "docs"

    def __post_init__(self) -> None:
        if self.samples < 0 or self.facts < 1 or self.per_document < 1:
            raise DatasetError(
                f"samples={self.samples}, facts={self.facts}, per_document={self.per_document}: "
                "samples must be 0 or more, the others 1 or more"
            )

    def __len__(self) -> int:
        return self.samples

    def documents(self) -> Iterator[Document]:
        """An endless stream of documents, in the order in which the samples use them."""
        number = 0
        while True:
            rng = random.Random(f"docs/{self.seed}/{number}")
            yield make_document(rng, self.facts, filler_share=self.filler_share, wordings=self.wordings)
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
    """`samples` questions with natural repetition: a few documents are asked about again and again.

    The n-th most popular of `documents` documents has weight 1/n**zipf. With probability `repeat` an earlier question of that
    document repeats word for word; with `vary` the document is changed (paraphrase, reorder, edit,
    extend, merge). A sample's `relation` field says which: new, same_document, repeat, or the kind of change;
    `mustChange`: the answer from the source document would be wrong.
    """

    seed: int = 0
    samples: int = 100
    facts: int = 16
    documents: int = 20
    zipf: float = 1.0
    repeat: float = 0.3
    vary: float = 0.3
    name: str = "docs-stream"

    def __post_init__(self) -> None:
        if self.documents < 1 or self.samples < 0:
            raise DatasetError(f"documents={self.documents}, samples={self.samples}: give at least 1 and 0")
        if min(self.repeat, self.vary) < 0 or self.repeat + self.vary > 1:
            raise DatasetError(f"repeat={self.repeat} and vary={self.vary} are probabilities: their sum is at most 1")

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
                yield sample_of(doc, question, fact, number, "same_document" if past else "new", doc.id if past else "")


def _varied(kind: Kind, source: Document, target: Document, question: Question, number: int) -> Sample:
    made = sample_of(target, question.text, question.fact, number, kind, source.id)
    fields = {**made.fields, "mustChange": question.must_change, "oldAnswer": question.old_answer}
    return Sample(made.id, made.question, made.answer, context=made.context, fields=fields)
