"""The guard of plans that knows how often they were wrong: it asks a gate, and the gate draws."""

from dejakv.engines.base import Prepared
from dejakv.trust.draw import Draw
from dejakv.trust.features import Known, Planned, features_of
from dejakv.trust.gate import Gate


class Bounded:
    """Asked once the plan of a request is chosen, and only for an approximate one: each answer is a draw of its own."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def judge(self, method: str, plan: Planned, found: Known, prepared: Prepared, setting: str) -> Draw:
        """Whether the plan may serve, and whether its outcome is to be learned from.

        method, setting  of the plan, and the quality that it runs with: evidence is collected for each pair of them
        """
        return self.gate.draw(
            partition=prepared.request.partition,
            epoch=prepared.epoch,
            method=method,
            setting=setting,
            features=features_of(plan, found, len(prepared.token_ids)),
        )
