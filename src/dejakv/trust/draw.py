"""Draws about would-be hits, and the labels that they wait for.

A draw is a decision that is taken before anything of the hit's outcome is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_PENDING = 1024
"""Maximum labels awaited at once.

Beyond it the oldest count as wrong, so no error is hidden by withholding its label.
"""

MAX_AUDITS = 32
"""Maximum audits awaited at once. Beyond it nothing more is served.

A process without idle time would serve unaudited hits otherwise.
"""


class ClassKey(NamedTuple):
    """A class of hits that are taken to be alike.

    Attributes
    ----------
    epoch : str
        Epoch of the model.
    method : str
        Method of the approximate plan.
    setting : str
        Settings that its quality depends on.
    group : str
        Digest of the partition or of its group (`TrustSettings.group_of`).
    """

    epoch: str
    method: str
    setting: str
    group: str


@dataclass(frozen=True)
class HitDraw:
    """Decision about one would-be hit.

    Attributes
    ----------
    cls : ClassKey
        Class of the hit.
    risk : float
        What orders hits, in [0, 1] (see `trust.features`).
    time : float
        Time of its try, as a share of the exact plan's time (see `features.TIME_SHARE`).
    served : bool
        Whether the approximate answer is served. Otherwise the request is computed in full.
    labelled : bool
        Whether the other way is computed too, and its outcome handed to `TrustGate.learn`.
    share : float
        Probability with which such a hit was drawn to be labelled.
    reason : str
        Reason in words, for a record.
    id : str
        Id that no other draw has.
    late : bool
        Whether the risk is known only when the approximate plan has run. Until then nothing depends
        on it.
    round : str
        Collection of evidence of the class's `ClassEvidence` at the time.
    opened : int
        Its open rules at the time.
    warned : bool
        Whether drift was suspected at the time.
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
    """Awaited labels of one class.

    Each label waits for those that were drawn before it. Wrong answers may take longer to be
    noticed, and evidence that counts labels as they come would be too good. The gate's lock
    protects this object.
    """

    def __init__(self) -> None:
        self._draws: dict[str, HitDraw] = {}
        self._outcomes: dict[str, bool | None] = {}

    def __len__(self) -> int:
        return len(self._draws)

    def add(self, draw: HitDraw) -> None:
        """Wait for a draw's label; of more than `MAX_PENDING` the oldest counts as wrong."""
        self._draws[draw.id] = draw
        if len(self._draws) > MAX_PENDING:
            # The oldest: dictionaries keep the order of insertion, which is that of the draws.
            self.settle(next(iter(self._draws.values())), True)

    def awaits(self, draw: HitDraw) -> bool:
        """Return whether this draw's label is unknown."""
        return draw.id in self._draws and draw.id not in self._outcomes

    @property
    def audits(self) -> int:
        """Number of served hits whose label is still awaited."""
        return sum(draw.served and self.awaits(draw) for draw in self._draws.values())

    def settle(self, draw: HitDraw, wrong: bool | None) -> None:
        """Take the first label of an awaited draw; any other label is ignored.

        Parameters
        ----------
        draw : HitDraw
            The draw as it is known by now.
        wrong : bool or None
            The label, None for a lost one.
        """
        # A second label of the same draw changes nothing.
        if self.awaits(draw):
            self._draws[draw.id] = draw
            self._outcomes[draw.id] = wrong

    def give_up(self) -> None:
        """Count all unknown labels as wrong."""
        for draw in list(self._draws.values()):
            self.settle(draw, True)

    def ready(self) -> Iterator[tuple[HitDraw, bool | None]]:
        """Yield the labels that wait for no other one, the earliest first.

        A lost label is None. Each leaves when the next is asked for.
        """
        while self._draws:
            draw = next(iter(self._draws.values()))
            if draw.id not in self._outcomes:
                return
            # Deleted only afterwards: if its counting fails, the label waits on.
            yield draw, self._outcomes[draw.id]
            del self._draws[draw.id], self._outcomes[draw.id]
