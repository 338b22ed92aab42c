"""Pipelines under an error bound whose next hit is labelled, for tests of labels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.bounded import BOUNDED, hits, taught

from dejakv.decide.bound import setting_of
from dejakv.decide.plan import Method
from dejakv.engines.base import FULL, Refusal
from dejakv.trust.rules import PILOT


class Told:
    """An engine that tells what it ran, in front of another."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.ran: list[str] = []
        self.fails: Callable[[], None] = lambda: None
        self.refuses = ""

    def apart(self, kept: int) -> "Told":
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


def past_pilot(pipeline: Any, method: Method) -> None:
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
