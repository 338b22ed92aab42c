"""Donors by likeness: those that the levels propose and the guards accept."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dejakv.costs import Costs, Rate
from dejakv.errors import ConfigError
from dejakv.guards.base import Guard, Verdict
from dejakv.guards.chain import judge
from dejakv.levels.base import Level, Match, Query, Status
from dejakv.store.base import ChunkMeta

logger = logging.getLogger(__name__)

LEAST_NEW = 64
"""Tokens outside copied text for which the levels are asked as well. Most questions are shorter."""

WORTH_ASKING = 4
"""And then only if computing the rows that this may save takes so many times as long as asking, which may run an encoder and find
nothing."""


@dataclass(frozen=True)
class Alike:
    """match     the best donor; None if there is none
    donors    descriptions, the best first
    verdicts  what the guards said of each candidate they saw
    statuses  rows of the status table
    failed    what the last level that could not be asked raised, if one did
    """

    match: Match | None = None
    donors: tuple[ChunkMeta, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    statuses: Mapping[str, Status] = field(default_factory=dict[str, Status])
    failed: str = ""


class Likeness:
    """What the levels propose and the guards accept, and how long it takes to ask them. Thread-safe.

    seconds  in which the levels are asked, of the latest requests
    """

    def __init__(self, levels: Sequence[Level], guards: Sequence[Guard]) -> None:
        self.levels = levels
        self.guards = guards
        self.seconds = Rate(0.0)

    def worth_asking(self, new: int, tokens: int, costs: Costs | None, least: int = 0) -> bool:
        """Whether donors should be looked for beside copied text that leaves `new` of the prompt's `tokens` tokens. `least` rows are
        computed whatever donors hold."""
        if new < LEAST_NEW or new <= least:
            return False
        if costs is None or costs.rows(new - least, tokens) >= WORTH_ASKING * self.seconds.value:
            return True
        self.seconds.missed()
        return False

    def search(
        self,
        query: Query,
        known: Callable[[str], ChunkMeta | None],
        *,
        blends: bool,
        most: int = 1,
        own: ChunkMeta | None = None,
        without: Collection[str] = (),
    ) -> Alike:
        """At most `most` donors of the first level that has one which the guards accept.

        known    the description of a donor that the request may use, None for another
        blends   what is found is for a blend, which computes words that differ: guards of words are not asked
        own      of the prompt itself, if it is stored: nothing is better, and no guard is asked
        without  donors that are used already

        Raises: ConfigError for a level whose settings are wrong.
        """
        began = time.perf_counter()
        match: Match | None = None
        donors: list[ChunkMeta] = []
        verdicts: list[Verdict] = []
        statuses: dict[str, Status] = {}
        failed = ""
        guards = [guard for guard in self.guards if not (blends and guard.waived_for_blend)]
        for level in self.levels:
            if match is not None:
                statuses |= {name: status for name, status in skipped([level]).items() if name not in statuses}
                continue
            try:
                search = level.search(query)
            except ConfigError:
                raise  # a setting is wrong, and its message says which
            except Exception as error:  # a level may be foreign code: its failure costs its own hits
                statuses[level.name], failed = "skip", type(error).__name__
                logger.debug("the level %s failed", level.name, exc_info=True)  # its message may hold a donor's text
                verdicts.append(Verdict("reject", level.name, f"the level failed: {failed}"))
                continue
            statuses.update(search.statuses)
            for candidate in _own_first([found for found in search.matches if found.donor not in without], own):
                meta = own if own is not None and candidate.donor == own.id else known(candidate.donor)
                if meta is None:
                    continue
                if meta is not own:
                    verdict = judge(guards, query.request, meta, candidate)
                    verdicts.append(verdict)
                    if verdict.decision != "accept":
                        continue
                match = match or candidate
                donors.append(meta)
                if len(donors) >= most or meta is own:
                    break
            if match is None and search.matches:
                statuses.update({name: "miss" for name, status in search.statuses.items() if status == "hit"})
        self.seconds.add(time.perf_counter() - began)
        return Alike(match, tuple(donors), tuple(verdicts), statuses, failed)


def skipped(levels: Sequence[Level]) -> dict[str, Status]:
    """The status table of levels that are not asked."""
    return {name: "skip" for level in levels for name in level.status_names}


def _own_first(matches: Sequence[Match], own: ChunkMeta | None) -> list[Match]:
    """The prompt's own chunk goes before others with equal text: what can be exact is exact."""
    if own is not None and matches and matches[0].level == "exact_text":
        return [replace(matches[0], donor=own.id)]
    return sorted(matches, key=lambda match: own is None or match.donor != own.id)
