"""Requests about documents that the bundled model reads, streams of them under an error bound, and pipelines whose next hit
is labelled."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.decide.bound import setting_of
from dejakv.engines.base import FULL, Refusal
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request, Sampling
from dejakv.trust.rules import PILOT
from dejakv_models.docs import ask, make_document, prompt_of

RNG = random.Random(3)
DOCUMENT = make_document(RNG, facts=20)
OTHER = make_document(RNG, facts=20)
FACT = DOCUMENT.facts[3]
COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Fixed: what is measured on a busy machine may speak for another plan."""
ADOPT = SemanticCacheConfig(reuse="adopt", index_encoder="model", similarity_threshold=0.0, min_gain=1, costs=COSTS)
EXACT = SemanticCacheConfig(index_encoder="model", costs=COSTS)


def request(question: str, context: str = DOCUMENT.text, **more: Any) -> Request:
    prompt = prompt_of(context, question)
    return Request("r", prompt, more.pop("chunk", question), sampling=Sampling(4), **more)


def wordings() -> tuple[str, str]:
    """One question in two wordings."""
    found = sorted({ask(FACT, random.Random(seed)) for seed in range(40)})
    return found[0], found[1]


def uncached(engine: Any, wanted: Request) -> Answer:
    return Pipeline(engine).answer(wanted)


STREAM_RNG = random.Random(7)
DOCUMENTS = [make_document(STREAM_RNG, facts=5) for _ in range(9)]

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
    """A data set (`--dataset tests.documents:stream`): the documents alone, then the same prompts as `hits`."""
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


class Told:
    """An engine that tells what it ran, in front of another."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.ran: list[str] = []
        self.fails: Callable[[], None] = lambda: None
        self.refuses = ""

    def without_own_state(self, prefix_tokens: int) -> "Told":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, prepared: Any, plan: Any = FULL, *given: Any, **named: Any) -> Any:
        self.fails()
        if plan.method == "blend" and self.refuses:
            return Refusal(self.refuses)
        self.ran.append("blend" if plan.method == "blend" else "run")
        return self._engine.run(prepared, plan, *given, **named)


Made = tuple[Any, Any]


def blending(make: Callable[..., Any], **settings: Any) -> Made:
    """A pipeline past its pilot, so that the next hit is labelled, and the stream of its hits. `make`: the fixture `served`."""
    pipeline = make(replace(BOUNDED, **settings))
    taught(pipeline)
    past_pilot(pipeline, "blend")
    pipeline.engine = Told(pipeline.engine)
    return pipeline, hits()


def past_pilot(pipeline: Any, method: str) -> None:
    """Draws as many hits of a method as a pilot takes."""
    cache = pipeline.cache
    cls = cache.gate.class_of("default", pipeline.engine.epoch, method, setting_of(method, cache.config))
    for number in range(PILOT):
        cache.gate.draw(cls, {"score": 1 - number / PILOT})


def figures(pipeline: Any) -> tuple[int, int, int]:
    """Explored, wrong among these, and lost."""
    report = pipeline.cache.trust(None)
    assert report is not None
    return report.explored, report.explored_wrong, report.lost


def asked(made: Made) -> Any:
    """The answer to the next would-be hit, whose label waits."""
    pipeline, stream = made
    answer = pipeline.answer(next(stream))
    assert answer.record.reason.startswith("error bound: ")
    assert answer.record.approximate is False
    assert pipeline.waiting == 1
    return answer
