"""Streams of prompts that blends could answer, under an error bound that takes few labels, and labels that a test decides."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.asking import EXACT, request

from dejakv.datasets.base import Sample
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request
from dejakv_models.docs import ask, make_document

RNG = random.Random(7)
DOCUMENTS = [make_document(RNG, facts=5) for _ in range(9)]

BOUNDED = replace(
    EXACT, reuse="blend", semantic_text=False, error_bound=0.3, confidence=0.9, audit_share=1.0, max_generation=0
)
"""Every hit is labelled, so that no test depends on chance."""

WRONG: Iterator[bool] = iter(())
"""What `decided` says next; right where it has ended."""


def decided(_request: Request, _full: str, _reused: str) -> bool:
    """A `differs` of the tests' own."""
    return next(WRONG, False)


def says(outcomes: Iterator[bool]) -> str:
    """Has `decided` say these, and names it."""
    global WRONG
    WRONG = outcomes
    return f"{__name__}:decided"


def taught(pipeline: Pipeline, partition: str = "default") -> None:
    """The documents alone: the state that blends take."""
    for document in DOCUMENTS:
        asked = ask(document.facts[0], random.Random(0))
        pipeline.answer(request(asked, document.text, partition=partition))
        pipeline.cache.flush()


def hits(partition: str = "default") -> Iterator[Request]:
    """Prompts of two documents each, in every order: each is one that has not come before."""
    for question, text in _asked():
        yield request(question, text, partition=partition)


def many_hits() -> Iterator[Request]:
    """The same, then prompts of three documents."""
    yield from hits()
    for number, three in enumerate(itertools.permutations(DOCUMENTS, 3)):
        fact = random.Random(number).choice(three[0].facts)
        yield request(ask(fact, random.Random(number)), " ".join(document.text for document in three))


def _asked() -> Iterator[tuple[str, str]]:
    pairs = [(one, other) for one in DOCUMENTS for other in DOCUMENTS if one is not other]
    random.Random(1).shuffle(pairs)
    for number, (one, other) in enumerate(pairs):
        fact = random.Random(number).choice(other.facts)
        yield ask(fact, random.Random(number)), f"{one.text} {other.text}"


def stream(**_options: object) -> list[Sample]:
    """A data set (`--dataset tests.bounded:stream`): the documents alone, then the same prompts as `hits`."""
    alone = [
        Sample(document.id, ask(document.facts[0], random.Random(0)), context=document.text) for document in DOCUMENTS
    ]
    return [
        *alone,
        *(Sample(f"hit-{number}", question, context=text) for number, (question, text) in enumerate(_asked())),
    ]


def answers_to(pipeline: Pipeline, stream: Iterator[Request], most: int, **more: Any) -> list[Answer]:
    """The answers to the next prompts, each with the idle time behind it."""
    answers: list[Answer] = []
    for _, asked in zip(range(most), stream, strict=False):
        answers.append(pipeline.answer(asked, **more))
        pipeline.cache.flush()
        while pipeline.settle_one():
            pass
    return answers
