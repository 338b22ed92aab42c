"""The same question about another text is another question: what surrounds the chunk in the prompt must be equal."""

from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


class ContextGuard:
    """Rejects a donor whose prompt differs outside the chunk (another document, another system prompt).

    The levels compare chunks only. Where the prompt does not contain its chunk (a chunk made of other fields), nothing
    can be said and the guard abstains.
    """

    name = "context"
    waived_for_blend = True  # it recomputes what differs, so words may differ

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        here, there = _around(request.prompt, request.chunk), _around(donor.prompt, donor.chunk)
        if here is None or there is None:
            return Verdict("abstain", self.name, "the prompt does not contain the chunk: its surroundings are unknown")
        if here != there:
            return Verdict("reject", self.name, "the prompts differ outside the compared text")
        return Verdict("abstain", self.name, "the prompts are equal outside the compared text")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns nothing."""


def _around(prompt: str, chunk: str) -> tuple[str, str] | None:
    """The prompt before and after its last occurrence of the chunk; None without one."""
    if not chunk or chunk not in prompt:
        return None
    before, _, after = prompt.rpartition(chunk)
    return before, after
