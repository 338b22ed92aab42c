"""What there is for a request, before a plan is made of it."""

from dataclasses import dataclass, replace

from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.store.base import ChunkMeta
from dejakv.store.prefix import PrefixHit

COPIED = "copied"
"""Level of donors that hold runs of the prompt's tokens. They are verified, so that no guard is asked."""


@dataclass(frozen=True)
class Found:
    """Donors and an exact prefix.

    match     the best donor that passed the guards; `donors` its description first, further ones only for blend
    prefix    the longest exact prefix, whether it is worth loading or not
    verdicts  what the guards said of each candidate they saw
    copied    tokens of the prompt that stand in the donors, verified one by one; None where text was only compared
    runs      first token and length of each stretch of the prompt that stands in the donors
    held      the same with short stretches, by which a blend's rows are estimated (see `overlap`); None: not known
    like      donors that are only like the prompt, beside those that hold copied text: with them it may be blended too
    held_with_like  what all of these hold together
    failed    the name of the error of a level that could not be asked, empty if there was none
    """

    match: Match | None = None
    donors: tuple[ChunkMeta, ...] = ()
    prefix: tuple[PrefixHit, ChunkMeta] | None = None
    verdicts: tuple[Verdict, ...] = ()
    copied: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    held: tuple[tuple[int, int], ...] | None = None
    like: tuple[ChunkMeta, ...] = ()
    held_with_like: tuple[tuple[int, int], ...] | None = None
    failed: str = ""

    @property
    def refused(self) -> str:
        """Why there is no match although something was found: the first rejection, which is the best candidate's."""
        if self.match is not None:
            return ""
        return next((f"{v.guard}: {v.reason}" for v in self.verdicts if v.decision == "reject"), "")

    @property
    def joined(self) -> "Found":
        """The same with the donors that are only like the prompt among the donors."""
        return replace(self, donors=(*self.donors, *self.like), held=self.held_with_like)

    def new(self, tokens: int, kept: int) -> int:
        """Of a prompt of `tokens` tokens those behind the first `kept` that no donor holds; 0 where it is not known."""
        if self.held is None:
            return 0
        return tokens - kept - sum(max(0, first + length - max(first, kept)) for first, length in self.held)
