"""Which way of reuse is worth it: of those that may run, the cheapest. An approximate one must be asked for.

Where an engine knows no costs, an approximate way that saves enough comes before the exact prefix, and that before full
computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dejakv.costs import MAX_SHARE, Costs
from dejakv.engines.base import reusable
from dejakv.find.ask import Ask
from dejakv.find.candidates import Candidate, LeastGain, MostRows, PlanGuard, approximate_ways, exact_ways
from dejakv.find.found import Found
from dejakv.find.ways import Plan

COSTS = "costs"
"""How the reason begins where an approximate way may run and an exact one takes less time."""


@dataclass(frozen=True)
class Planned:
    """What runs, the exact plan that would run instead, and all that was considered."""

    plan: Plan
    exact: Plan
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        """`full 0.3 s, exact prefix 0.21 s, blend 0.19 s: blend`"""
        return f"{', '.join(map(str, self.candidates))}: {self.plan.name}"


def plan(
    tokens: int,
    found: Found,
    ask: Ask,
    *,
    same: bool = False,
    min_gain: int = 0,
    share: float = 0.0,
    most: int = 1,
    tail: int = 1,
    costs: Costs | None = None,
    guards: Sequence[PlanGuard] = (),
    piece: int = 1,
) -> Planned:
    """Chooses for a prompt of `tokens` tokens.

    same      the donor's token ids and media equal the request's: exact reuse, whatever was asked
    min_gain  tokens that an approximate plan must save, see `LeastGain`
    share     rows that blend would recompute at least, of those that are not exact
    most      donors that a blend takes
    tail      rows that `top_layer` would compute at least
    costs     what rows, bytes and blends take; None: not known
    guards    asked beside `LeastGain` and `MostRows`
    piece     see `Prepared`
    """
    ways = tuple(exact_ways(tokens, found, costs, piece))
    exact = _cheapest(ways).plan
    if found.match is None or not found.donors:
        return Planned(replace(exact, reason=found.refused), exact, ways)
    if same:
        held = reusable(tokens, tokens, piece, found.donors[0].spans)
        if not held:
            reason = f"the prompt is shorter than a piece of {piece} tokens, which is the least that is reused in low precision"
            return Planned(Plan("none", reason=reason), exact, ways)
        chosen = Plan("exact", found.donors[:1], found.match, held)
        took = costs.prefix(held, tokens) if costs else None
        return Planned(chosen, exact, (*ways, Candidate(chosen, took)))
    if ask.method == "exact":
        level = found.match.level
        why = (
            f"not asked for: {level} found a donor whose tokens differ, and reuse is exact (--reuse adopt would use it)"
        )
        return Planned(replace(exact, reason=why), exact, ways)
    judges = (LeastGain(min_gain), MostRows(MAX_SHARE), *guards)
    others = tuple(
        replace(way, refused=next(filter(None, (judge.refuses(way.plan, tokens, exact) for judge in judges)), ""))
        for way in approximate_ways(tokens, found, ask, costs, share=share, most=most, tail=tail, piece=piece)
    )
    admitted = [way for way in others if not way.refused]
    if not admitted:
        return Planned(replace(exact, reason=others[0].refused), exact, (*ways, *others))
    chosen = _cheapest([*ways, *admitted]).plan
    made = Planned(chosen, exact, (*ways, *others))
    if chosen.approximate:
        return made
    return replace(made, plan=replace(chosen, reason=f"{COSTS}: {made}"))


def most_computed(tokens: int, chosen: Plan, exact: Plan, min_gain: int, costs: Costs | None) -> float:
    """The share of its rows, the mean over layers, that a piecewise plan may compute when its token map is known: beyond it the exact
    plan is cheaper, or `min_gain` is missed. In [0, 1]."""
    rows = float(tokens - exact.reused - min_gain)
    if costs is not None:
        seconds = costs.prefix(exact.reused, tokens) if exact.donors else costs.full(tokens)
        rows = min(rows, costs.most_rows(seconds, tokens, chosen.loaded(tokens)))
    return min(1.0, max(0.0, rows / tokens))


def _cheapest(ways: Sequence[Candidate]) -> Candidate:
    """Of equal ones the first. Without costs the one that reuses most."""
    if any(way.seconds is None for way in ways):
        return max(ways, key=lambda way: way.plan.reused)
    return min(ways, key=lambda way: way.seconds or 0.0)
