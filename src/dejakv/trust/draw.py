"""Draws: decisions about would-be hits, made before anything of their outcome is known, and the labels that are awaited.

Wrong answers may take longer to be found than right ones. Were labels counted as they come, the evidence would be too good for as
long as wrong ones are awaited, and a rule that opens then stays open. So a label waits for those that were drawn before it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 1024
"""Labels that are awaited at once. Of more, the oldest count as wrong: an error cannot be hidden by never telling its label."""

MOST_AUDITS = 32
"""Audits that are awaited at once; then nothing more is served. Otherwise a process that is never idle would serve unaudited."""


class ClassKey(NamedTuple):
    """A class of hits that are taken to be alike. `group`: see `TrustSettings.group_of`."""

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


@dataclass
class _Entry:
    draw: Draw
    known: bool = False
    wrong: bool | None = None


class Pending:
    """The awaited labels of one class, counted in the order of their draws. Not thread-safe: the gate's lock protects it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.audits = 0
        """Audits among them that are not known yet."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, draw: Draw) -> None:
        """Waits for a draw's label."""
        self._entries[draw.id] = _Entry(draw)
        self.audits += draw.served
        if len(self._entries) > MOST:
            oldest = next(iter(self._entries.values()))
            self.settle(oldest.draw, True)

    def waits_for(self, draw: Draw) -> bool:
        """Whether the label of this draw is not known yet."""
        return draw.id in self._entries and not self._entries[draw.id].known

    def give_up(self) -> None:
        """Counts all labels that are not known as wrong."""
        for entry in list(self._entries.values()):
            self.settle(entry.draw, True)

    def settle(self, draw: Draw, wrong: bool | None) -> None:
        """Takes a label; None: it is lost. One that is not awaited was drawn elsewhere or is settled already: it goes to the end, and
        the ledger knows whether it was counted."""
        if wrong is None and draw.id not in self._entries:
            return
        if draw.id in self._entries and not self._entries[draw.id].known:
            self.audits -= self._entries[draw.id].draw.served
        entry = self._entries.setdefault(draw.id, _Entry(draw))
        if not entry.known:
            entry.known, entry.wrong, entry.draw = True, wrong, draw

    def ready(self) -> Iterator[tuple[Draw, bool | None]]:
        """The labels that wait for no other one, the earliest first. Each leaves when the next is asked for."""
        while self._entries:
            id, entry = next(iter(self._entries.items()))
            if not entry.known:
                return
            yield entry.draw, entry.wrong
            del self._entries[id]
