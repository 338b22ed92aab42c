"""What a finder decided for one request, and what it decided from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dejakv.engines.base import Accept
from dejakv.find.ask import Ask
from dejakv.find.candidates import Candidate
from dejakv.find.found import COPIED, Found
from dejakv.find.ways import Plan
from dejakv.levels.base import Query, Status
from dejakv.trust.draw import Draw


def settled(statuses: Mapping[str, Status], plan: Plan) -> dict[str, Status]:
    """The status table once it is known what is run: a level whose donor is not used is no hit, and `kv_cache` is one
    exactly where state is used."""
    copied_alone = plan.match is not None and plan.match.level == COPIED and not plan.like
    rows: dict[str, Status] = {}
    for name, status in statuses.items():
        unused = plan.match is None or (copied_alone and name != COPIED)
        rows[name] = "miss" if unused and status == "hit" else status
    rows["kv_cache"] = "hit" if plan.donors else "miss"
    return rows


@dataclass(frozen=True)
class Trial:
    """An approximate plan under an error bound, and what was drawn for it: whether it is served, and whether it is labelled.

    draw    None where the plan must be tried first
    judge   then draws, from what its first token shows (`trust.certainty`)
    accept  asked for the first token when the plan runs, if it is to be drawn for
    """

    plan: Plan
    draw: Draw | None = None
    judge: Callable[[Mapping[str, float]], Draw] | None = None
    accept: Accept | None = None


@dataclass(frozen=True)
class Decision:
    """How a request is to be run.

    key      exact key of the prompt: id of its own chunk, if it is stored; `tokens` its length
    plan     what to run
    exact    what to run if that turns out not to be possible: the exact prefix, or nothing
    ways     every plan that was considered, with its seconds, or what speaks against it
    query    what the levels were asked
    seconds  what finding took
    trial    the approximate plan that was chosen, where there is an error bound; `plan` is it only if it was drawn to be served
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
    ways: tuple[Candidate, ...] = ()
    trial: Trial | None = None

    def __str__(self) -> str:
        """`full 0.3 s, exact prefix 0.21 s, blend 0.19 s: blend`"""
        return f"{', '.join(map(str, self.ways))}: {self.plan.name}"
