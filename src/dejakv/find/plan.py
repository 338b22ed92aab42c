"""Which way of reuse is worth it. The exact prefix is always a way; an approximate one must be asked for and save more."""

from dataclasses import dataclass

from dejakv.find.ask import Ask
from dejakv.find.found import Found
from dejakv.levels.base import Match
from dejakv.records import Method
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Plan:
    """How a request is going to run.

    method   `none`, `prefix`, `exact`, `adopt` or `blend`
    donors   whose state is used, best first (more than one only for blend)
    reused   prompt tokens that are not computed (for blend: an estimate made before the token map is known)
    reason   why a donor that was found is not used, else empty
    """

    method: Method
    donors: tuple[ChunkMeta, ...] = ()
    match: Match | None = None
    reused: int = 0
    reason: str = ""

    @property
    def approximate(self) -> bool:
        return self.method in ("adopt", "blend")


def plan(tokens: int, found: Found, ask: Ask, *, same: bool = False, min_gain: int = 0, share: float = 0.0) -> Plan:
    """Chooses for a prompt of `tokens` tokens.

    same      the donor's token ids and media equal the request's: exact reuse, whatever was asked
    min_gain  tokens that an approximate plan must save beyond the exact prefix
    share     rows that blend would recompute at least; what is not copied is computed beyond it
    """
    prefix, match = found.prefix, found.match
    held = prefix[0].tokens if prefix else 0

    def without(reason: str) -> Plan:
        return Plan("prefix" if prefix else "none", (prefix[1],) if prefix else (), None, held, reason)

    if match is None or not found.donors:
        return without(found.refused)
    if same:
        return Plan("exact", found.donors[:1], match, tokens - 1)
    if ask.method == "exact":
        return without(
            f"not asked for: {match.level} found a donor whose tokens differ, and reuse is exact (--reuse adopt would use it)"
        )
    computed = 1 if ask.method == "adopt" else max(1, round(tokens * share), tokens - (found.copied or tokens))
    gain = (tokens - held) - computed
    if gain < min_gain:
        return without(
            f"min_gain: {ask.method} would save {gain} tokens beyond the exact prefix, {min_gain} are asked for"
        )
    return Plan(ask.method, found.donors, match, tokens - computed)
