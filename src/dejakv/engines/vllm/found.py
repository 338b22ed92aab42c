"""What a lookup says to the scheduler side."""

from dataclasses import dataclass

from dejakv.decide.plan import Decision
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class LookupResult:
    """What a lookup says.

    method  `none`, `exact` (token for token, perhaps a prefix) or `blend`
    donors  stored chunks whose state is taken, the best first; more than one for blend alone
    tokens  leading tokens of the prompt that the donors' state covers (for blend: all that is mapped)
    save    how the prompt's own state would be stored; None if it must not or need not be
    key     the prompt's exact key, empty where it could not be made
    instead of a blend: the exact prefix to take if the blend turns out not to be possible
    """

    method: str = "none"
    donors: tuple[str, ...] = ()
    tokens: int = 0
    level: str = ""
    score: float | None = None
    reason: str = ""
    key: str = ""
    save: ChunkMeta | None = None
    seconds: float = 0.0
    instead: "LookupResult | None" = None

    @property
    def donor(self) -> str | None:
        """The best donor."""
        return self.donors[0] if self.donors else None


def told(decision: Decision, instead: str = "") -> LookupResult:
    """The decision as the scheduler takes it. `instead`: why a blend that was asked for was not looked for."""
    chosen = decision.plan
    reason = instead or chosen.reason
    exact = LookupResult(reason=reason or "no stored chunk begins like this prompt", key=decision.key)
    if decision.found.prefix is not None:
        hit, meta = decision.found.prefix
        whole = meta.id == decision.key
        level = "exact_text" if whole else "prefix"
        exact = LookupResult("exact", (meta.id,), hit.tokens, level, 1.0, "" if whole else reason, decision.key)
    if chosen.method != "blend" or chosen.match is None:
        return exact
    donors, match = tuple(meta.id for meta in chosen.donors), chosen.match
    fallback = exact if exact.donors else None
    return LookupResult("blend", donors, decision.tokens, match.level, match.score, key=decision.key, instead=fallback)
