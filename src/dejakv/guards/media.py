"""The same question about another picture is another question."""

from dejakv.guards.base import Verdict
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


def media_of(request: Request, donor: ChunkMeta) -> tuple[list[str], list[str]]:
    """The digests of the distinct media of a request and of a donor, each in their order."""
    here = list(dict.fromkeys(medium.digest for medium in request.media))
    there = list(dict.fromkeys(span.digest for span in donor.spans))
    return here, there


class MediaGuard:
    """Rejects a donor with other media, whatever space it was found in: a second lock on `--media exact`.

    Not to be used with `--media similar` or `ignore`, where other media are what was asked for.
    """

    name = "media"
    waived_for_blend = False

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        here, there = media_of(request, donor)
        if here != there:
            return Verdict("reject", self.name, f"other media: {len(here)} here, {len(there)} there, not the same ones")
        return Verdict("abstain", self.name, "the same media" if here else "no media")

    def observe(self, request: Request, donor: ChunkMeta, match: Match, agreed: bool) -> None:
        """Learns nothing."""
