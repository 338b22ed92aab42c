"""Which way of reuse is worth it. The exact prefix is always a way; an approximate one must be asked for and save more."""

from dataclasses import dataclass

from dejakv.config import ReuseMethod
from dejakv.levels.base import Match
from dejakv.prefix import PrefixHit
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


def plan(
    tokens: int,
    prefix: tuple[PrefixHit, ChunkMeta] | None,
    match: Match | None,
    donors: tuple[ChunkMeta, ...],
    *,
    same: bool,
    asked: ReuseMethod,
    min_gain: int,
    share: float = 0.0,
    refused: str = "",
) -> Plan:
    """Chooses for a prompt of `tokens` tokens.

    prefix   the longest exact prefix there is
    match    the donor that the guards let pass, `donors` its state's description first
    same     the donor's token ids and media equal the request's: exact reuse, whatever was asked
    share    of the rows that blend would recompute at least
    refused  why there is no match although something was found
    """
    held = prefix[0].tokens if prefix else 0
    fallback_method: Method = "prefix" if prefix else "none"
    fallback = (prefix[1],) if prefix else ()

    def without(reason: str) -> Plan:
        return Plan(fallback_method, fallback, None, held, reason)

    if match is None or not donors:
        return without(refused)
    if same:
        return Plan("exact", donors[:1], match, tokens - 1)
    if asked == "exact":
        return without("not asked for: reuse is exact and the tokens differ")
    computed = 1 if asked == "adopt" else max(1, round(tokens * share))
    gain = (tokens - held) - computed
    if gain < min_gain:
        return without(f"min_gain: {asked} would save {gain} tokens beyond the exact prefix, {min_gain} are asked for")
    return Plan(asked, donors, match, tokens - computed)
