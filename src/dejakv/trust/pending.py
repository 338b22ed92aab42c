"""Labels of one class that are waited for, counted in the order of their draws.

Wrong answers may take longer to be found than right ones. Were labels counted as they come, the evidence would be too good for as
long as wrong ones are waited for, and a rule that opens then stays open. So a label waits for those that were drawn before it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from dejakv.trust.draw import Draw

MOST = 1024
"""Labels that are waited for at once. Of more, the oldest count as wrong: nobody may hide an error by never telling."""

MOST_AUDITS = 32
"""Served hits of which the audit is waited for: with more, nothing more is served. Else a process that is never idle, and so audits
nothing, would serve for ever."""


@dataclass
class _Entry:
    draw: Draw
    known: bool = False
    wrong: bool | None = None


class Pending:
    """Not thread-safe: the gate's lock protects it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.audits = 0
        """Served hits of which the label is not known yet."""

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
        """Waits no longer: labels that are not known count as wrong."""
        for entry in list(self._entries.values()):
            self.settle(entry.draw, True)

    def settle(self, draw: Draw, wrong: bool | None) -> None:
        """The label is here; None: it is lost. A draw that is not waited for was made elsewhere, or is settled already: it is
        put at the end, and the ledger knows whether it was counted."""
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
