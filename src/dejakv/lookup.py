"""What a lookup is asked for, and what it found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dejakv.config import ReuseMethod, SemanticCacheConfig
from dejakv.guards.base import Verdict
from dejakv.levels.base import Match, Query, Status
from dejakv.prefix import PrefixHit
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Lookup:
    """What was found for one request, before it is decided what to do with it.

    key       exact key of the prompt: id of its own chunk, if it is stored
    match     the best donor that passed the guards
    verdicts  what the guards said of each candidate they saw
    """

    key: str
    query: Query
    prefix: tuple[PrefixHit, ChunkMeta] | None
    match: Match | None
    donors: tuple[ChunkMeta, ...]
    statuses: Mapping[str, Status]
    verdicts: tuple[Verdict, ...] = ()
    seconds: float = 0.0


def asked_of(request: Request, config: SemanticCacheConfig) -> ReuseMethod:
    """What the request asks for, else what the cache is set to. `off` reuses nothing but what is exact."""
    if request.reuse is None:
        return config.reuse
    return "exact" if request.reuse == "off" else request.reuse


def own_first(matches: Sequence[Match], key: str, own: bool) -> list[Match]:
    """The prompt's own chunk, if it is stored, goes before others with equal text: what can be exact is exact."""
    if own and matches and matches[0].level == "exact_text":
        return [replace(matches[0], donor=key)]
    return sorted(matches, key=lambda match: match.donor != key)
