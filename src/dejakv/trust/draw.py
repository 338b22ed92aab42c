"""Draws: decisions about would-be hits, made before anything of their outcome is known, and the labels that are awaited."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MOST = 1024
"""Most labels awaited at once. Beyond, the oldest count as wrong: no error is hidden by withholding its label."""

MOST_AUDITS = 32
"""Most audits awaited at once; beyond, nothing more is served. Otherwise a process without idle time would serve unaudited."""


class ClassKey(NamedTuple):
    """A class of hits that are taken to be alike. `group`: see `TrustSettings.group_of`."""

    epoch: str
    method: str
    setting: str
    group: str


@dataclass(frozen=True)
class HitDraw:
    """One would-be hit.

    risk      what orders hits, in [0, 1]; see `trust.features`
    time      what its try takes, as a share of the exact plan's time; see `features.TIME_SHARE`
    served    the approximate answer is served; else the request is computed in full
    labelled  the other way is computed too, and the outcome is handed to `Gate.learn`
    share     probability with which such a hit was drawn to be labelled
    reason    why, in words for a record
    id        unlike any other draw's
    late      the risk is known when the approximate plan has run; until then nothing depends on it
    round, opened, warned  as they were in the class's `State`: its collection of evidence, its open rules, whether drift was suspected
    """

    cls: ClassKey
    risk: float
    time: float = 0.0
    served: bool = False
    labelled: bool = False
    share: float = 0.0
    reason: str = ""
    id: str = ""
    late: bool = False
    round: str = ""
    opened: int = 0
    warned: bool = False


class PendingLabels:
    """The awaited labels of one class. Each waits for those that were drawn before it: wrong answers may take longer to be found, and
    evidence that counts labels as they come would be too good. The gate's lock protects it."""

    def __init__(self) -> None:
        self._draws: dict[str, HitDraw] = {}
        self._outcomes: dict[str, bool | None] = {}

    def __len__(self) -> int:
        return len(self._draws)

    def add(self, draw: HitDraw) -> None:
        """Waits for a draw's label."""
        self._draws[draw.id] = draw
        if len(self._draws) > MOST:
            # The oldest: dictionaries keep the order of insertion, which is that of the draws.
            self.settle(next(iter(self._draws.values())), True)

    def awaits(self, draw: HitDraw) -> bool:
        """Whether this draw's label is unknown."""
        return draw.id in self._draws and draw.id not in self._outcomes

    @property
    def audits(self) -> int:
        """Unknown audits among them."""
        return sum(draw.served and self.awaits(draw) for draw in self._draws.values())

    def settle(self, draw: HitDraw, wrong: bool | None) -> None:
        """Takes the first label of an awaited draw, None for a lost one, and the draw as it is known by now."""
        # A second label of the same draw changes nothing.
        if self.awaits(draw):
            self._draws[draw.id] = draw
            self._outcomes[draw.id] = wrong

    def give_up(self) -> None:
        """Counts all unknown labels as wrong."""
        for draw in list(self._draws.values()):
            self.settle(draw, True)

    def ready(self) -> Iterator[tuple[HitDraw, bool | None]]:
        """Yield the labels that wait for no other one, the earliest first; None for a lost one. Each leaves when the next is asked for."""
        while self._draws:
            draw = next(iter(self._draws.values()))
            if draw.id not in self._outcomes:
                return
            # Deleted only afterwards: if its counting fails, the label waits on.
            yield draw, self._outcomes[draw.id]
            del self._draws[draw.id], self._outcomes[draw.id]
