"""What a finder decided for one request, and what it decided from."""

from collections.abc import Mapping
from dataclasses import dataclass

from dejakv.find.ask import Ask
from dejakv.find.found import Found
from dejakv.find.plan import Plan
from dejakv.levels.base import Query, Status


@dataclass(frozen=True)
class Decision:
    """How a request is to be run.

    key      exact key of the prompt: id of its own chunk, if it is stored; `tokens` its length
    plan     what to run
    exact    what to run if that turns out not to be possible: the exact prefix, or nothing
    query    what the levels were asked
    seconds  what finding took
    """

    key: str
    tokens: int
    ask: Ask
    plan: Plan
    exact: Plan
    found: Found
    query: Query
    statuses: Mapping[str, Status]
    seconds: float = 0.0
