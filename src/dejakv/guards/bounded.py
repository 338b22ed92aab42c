"""The guard of plans that knows how often they were wrong: it asks a gate, and the gate draws."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dejakv.request import Request
from dejakv.trust.draw import Draw
from dejakv.trust.features import LATE_BLEND, Known, Planned, features_of
from dejakv.trust.gate import Gate


class Asked(Protocol):
    """An `engines.base.Prepared`, as far as it is looked at here."""

    @property
    def request(self) -> Request: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def epoch(self) -> str: ...


class Bounded:
    """Asked once the plan of a request is chosen, and only for an approximate one: each answer is a draw of its own.

    epoch_of  the epoch that a request's evidence is kept under, where its own says more than the model; None: its own
    """

    def __init__(self, gate: Gate, epoch_of: Callable[[Asked], str] | None = None) -> None:
        self.gate = gate
        self._epoch_of: Callable[[Asked], str] = epoch_of or (lambda prepared: prepared.epoch)

    def tries(self, prepared: Asked, setting: str, known: Mapping[str, float]) -> bool:
        """Whether a blend of which this is known (`TIME_SHARE`) may be served once it was tried."""
        epoch, partition = self._epoch_of(prepared), prepared.request.partition
        return self.gate.tries(known, partition=partition, epoch=epoch, method=LATE_BLEND, setting=setting)

    def judge(
        self,
        plan: Planned,
        found: Known,
        prepared: Asked,
        setting: str,
        tried: Mapping[str, float] | None = None,
        *,
        late: bool = False,
    ) -> Draw:
        """Whether a `find.ways.Plan` may serve, and whether its outcome is to be learned from.

        found    what the plan was made from, a `find.found.Found`
        setting  the quality that it runs with: evidence is collected for each method and setting
        tried    of a blend that is judged by its first token: `TIME_SHARE`, and what is known from trying it, `trust.certainty`
        late     that will be known with its label
        """
        return self.gate.draw(
            partition=prepared.request.partition,
            epoch=self._epoch_of(prepared),
            method=LATE_BLEND if tried is not None else plan.method,
            setting=setting,
            features={**features_of(plan, found, len(prepared.token_ids)), **(tried or {})},
            late=late,
        )
