"""Donors by likeness: those that the levels propose and the guards accept."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from dejakv.decide.guards.base import Guard, Verdict, judge
from dejakv.decide.levels.base import Level, Match, Query, Status
from dejakv.decide.plan import Found
from dejakv.errors import ConfigError
from dejakv.store.base import ChunkMeta

logger = logging.getLogger(__name__)


def alike(
    levels: Sequence[Level],
    guards: Sequence[Guard],
    query: Query,
    known: Callable[[str], ChunkMeta | None],
    *,
    blends: bool,
    most: int = 1,
    own: ChunkMeta | None = None,
) -> tuple[Found, dict[str, Status]]:
    """At most `most` donors of the first level that has one which the guards accept, and the rows of the status table.

    known    the description of a donor that the request may use, None for another
    blends   what is found is for a blend, which computes words that differ: guards of words are not asked
    own      of the prompt itself, if it is stored: nothing is better, and no guard is asked

    Raises: ConfigError for a level whose settings are wrong.
    """
    match: Match | None = None
    donors: list[ChunkMeta] = []
    verdicts: list[Verdict] = []
    statuses: dict[str, Status] = {}
    failed = ""
    asked = [guard for guard in guards if not (blends and guard.waived_for_blend)]
    for level in levels:
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
        for candidate in _own_first(search.matches, own):
            meta = own if own is not None and candidate.donor == own.id else known(candidate.donor)
            if meta is None:
                continue
            if meta is not own:
                verdict = judge(asked, query.request, meta, candidate)
                verdicts.append(verdict)
                if verdict.decision != "accept":
                    continue
            match = match or candidate
            donors.append(meta)
            if len(donors) >= most or meta is own:
                break
        if match is None and search.matches:
            statuses.update({name: "miss" for name, status in search.statuses.items() if status == "hit"})
    return Found(match, tuple(donors), verdicts=tuple(verdicts), failed=failed), statuses


def skipped(levels: Sequence[Level]) -> dict[str, Status]:
    """The status table of levels that are not asked."""
    return {name: "skip" for level in levels for name in level.status_names}


def _own_first(matches: Sequence[Match], own: ChunkMeta | None) -> list[Match]:
    """The prompt's own chunk goes before others with equal text: what can be exact is exact."""
    if own is not None and matches and matches[0].level == "exact_text":
        return [replace(matches[0], donor=own.id)]
    return sorted(matches, key=lambda match: own is None or match.donor != own.id)
