"""What there is for a request, before a plan is made of it."""

from dataclasses import dataclass

from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.store.base import ChunkMeta
from dejakv.store.prefix import PrefixHit


@dataclass(frozen=True)
class Found:
    """Donors and an exact prefix.

    match     the best donor that passed the guards; `donors` its description first, further ones only for blend
    prefix    the longest exact prefix, whether it is worth loading or not
    verdicts  what the guards said of each candidate they saw
    copied    tokens of the prompt that stand in the donors, verified one by one; None where text was only compared
    runs      first token and length of each run of them
    """

    match: Match | None = None
    donors: tuple[ChunkMeta, ...] = ()
    prefix: tuple[PrefixHit, ChunkMeta] | None = None
    verdicts: tuple[Verdict, ...] = ()
    copied: int | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def refused(self) -> str:
        """Why there is no match although something was found: the first rejection, which is the best candidate's."""
        if self.match is not None:
            return ""
        return next((f"{v.guard}: {v.reason}" for v in self.verdicts if v.decision == "reject"), "")
