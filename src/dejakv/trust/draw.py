"""What was decided for one would-be hit before anything of its outcome was known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class ClassKey(NamedTuple):
    """What evidence is collected for. Hits of one class are taken to be alike; see `TrustSettings.group_of` for `group`."""

    epoch: str
    method: str
    setting: str
    group: str


@dataclass(frozen=True)
class Draw:
    """One would-be hit.

    served    the approximate answer is served; else the request is computed in full
    labelled  the other way is computed too, and the outcome is handed to `Gate.learn`
    share     probability with which such a hit was drawn to be labelled
    rule      the loosest rule that was open, None while the gate was closed
    reason    why, in words for a record
    risk      what orders hits, in [0, 1]; see `trust.features`
    id        unlike any other draw's
    round     the collection of evidence that it belongs to; an alarm begins another one
    late      the risk is known when the approximate plan has run; until then nothing depends on it
    warned    drift was suspected, so that every served hit was audited
    """

    served: bool
    labelled: bool
    share: float
    rule: int | None
    reason: str
    cls: ClassKey
    risk: float
    features: Mapping[str, float] = field(default_factory=dict[str, float])
    id: str = ""
    round: str = ""
    late: bool = False
    warned: bool = False

    @property
    def opened(self) -> int:
        """Rules that were open."""
        return 0 if self.rule is None else self.rule + 1
