"""What a front with an error bound asks of the connector, and what it is told: which blends are served, and what a blend would be.

The front knows the evidence, and the connector knows the plan. So the front sends a limit with each request, and draws for the
label when the response has said what the plan was.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from dejakv.find.decision import Decision
from dejakv.trust.features import features_of, risk_of

NOTHING = -1.0
"""A risk below that of every blend."""


@dataclass(frozen=True)
class Limit:
    """Of which blends are served: those under this epoch and setting whose risk is at most `risk`."""

    risk: float = NOTHING
    epoch: str = ""
    setting: str = ""

    @classmethod
    def read(cls, value: object) -> "Limit | None":
        """The limit in a request; None if it is none."""
        if not isinstance(value, Mapping):
            return None
        given = cast(Mapping[str, Any], value)
        risk, epoch, setting = given.get("risk"), given.get("epoch"), given.get("setting")
        if not (is_number(risk) and isinstance(epoch, str) and isinstance(setting, str) and len(given) == 3):
            return None
        return cls(float(cast(float, risk)), epoch, setting)


@dataclass(frozen=True)
class Would:
    """A blend that was planned: where it is taken from, what its evidence is kept under, and what is known of it beforehand."""

    donors: tuple[str, ...]
    epoch: str
    setting: str
    features: Mapping[str, float]

    @classmethod
    def of(cls, decision: Decision, epoch: str, setting: str) -> "Would | None":
        """Of a decision; None if it is no blend."""
        plan = decision.plan
        if plan.method != "blend":
            return None
        features = features_of(plan, decision.found, decision.tokens)
        return cls(tuple(meta.id for meta in plan.donors), epoch, setting, features)

    @classmethod
    def read(cls, value: object) -> "Would | None":
        """What a response says; None if it says nothing of a blend."""
        if not isinstance(value, Mapping):
            return None
        told = cast(Mapping[str, Any], value)
        return cls(tuple(told["donors"]), told["epoch"], told["setting"], told["features"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def within(self, limit: Limit) -> bool:
        """Whether it is served."""
        same = (self.epoch, self.setting) == (limit.epoch, limit.setting)
        return same and risk_of("blend", self.features) <= limit.risk


def is_number(value: object) -> bool:
    """Whether a value from a request is a number that a float can hold: an integer in JSON has any length."""
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
