"""A donor whose answer was wrong once is not offered again."""

import threading

from cachetools import FIFOCache

from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

REMEMBERED = 10_000
"""Donors remembered at once; the oldest are forgotten first."""


class KnownWrongGuard:
    """Rejects donors that `observe` was told gave another answer than full computation. Thread-safe; memory is bounded.

    Without anybody who compares answers (a run with the arm `none`, a service with feedback) it never rejects.
    """

    name = "known_wrong"
    waived_for_blend = True  # a blend does not give the donor's answer

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._wrong: FIFOCache[str, None] = FIFOCache(remembered)
        self._lock = threading.Lock()

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        if donor.id in self._wrong:
            return Verdict("reject", self.name, "this donor's answer was wrong for an earlier request")
        return Verdict("abstain", self.name, "nothing is known against this donor")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Remembers a donor whose answer was not full computation's."""
        if agreed:
            return
        with self._lock:
            self._wrong[donor.id] = None
