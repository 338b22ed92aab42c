"""The ways to run a prompt: what each would take, and what speaks against it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dejakv.costs import Costs
from dejakv.engines.base import reusable
from dejakv.find.ask import Ask
from dejakv.find.found import Found
from dejakv.find.ways import Plan
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Candidate:
    """A plan, the seconds it would take (None: not known), and why it may not run (empty: it may)."""

    plan: Plan
    seconds: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" {self.seconds:.2g} s"
        return f"{self.plan.name}{took}{f' ({self.refused})' if self.refused else ''}"


class PlanGuard(Protocol):
    """Judges plans as the other guards judge donors."""

    def refuses(self, plan: Plan, tokens: int, exact: Plan) -> str:
        """Why an approximate plan for a prompt of `tokens` tokens may not run, in words; empty if it may.

        exact  the exact plan that would run instead
        """
        ...


@dataclass(frozen=True)
class LeastGain:
    """Refuses plans that save fewer than `tokens` tokens beyond the exact one.

    An adopted prompt runs from state that is whole, its pictures' tokens included, and what it saves is counted so: over the whole
    prompt, as long as it is anything beyond the exact plan. A short question behind a picture would never be worth it else.
    """

    tokens: int

    def refuses(self, plan: Plan, tokens: int, exact: Plan) -> str:
        gain = plan.reused - exact.reused
        if gain >= self.tokens or (plan.method == "adopt" and gain > 0 and plan.reused >= self.tokens):
            return ""
        return f"min_gain: {plan.method} would save {gain} tokens beyond the exact prefix, {self.tokens} are asked for"


@dataclass(frozen=True)
class MostRows:
    """Refuses piecewise plans that compute more than `share` of the prompt's rows: they save little, and are still approximate."""

    share: float

    def refuses(self, plan: Plan, tokens: int, exact: Plan) -> str:
        rows = tokens - plan.reused
        if not plan.piecewise or rows <= self.share * tokens:
            return ""
        return f"rows: {plan.method} would compute {rows / tokens:.0%} of the prompt, {self.share:.0%} at most"


def exact_ways(tokens: int, found: Found, costs: Costs | None, piece: int = 1) -> Iterator[Candidate]:
    """Those that change no answer and are there for every prompt: in full, and behind the exact prefix. `piece`: see `Prepared`."""
    yield Candidate(Plan("none"), costs.full(tokens) if costs else None)
    if found.prefix is not None:
        hit, meta = found.prefix
        held = reusable(hit.tokens, tokens, piece, meta.spans)
        if held:
            yield Candidate(Plan("prefix", (meta,), None, held), costs.prefix(held, tokens) if costs else None)


def approximate_ways(
    tokens: int, found: Found, ask: Ask, costs: Costs | None, *, share: float, most: int, tail: int, piece: int = 1
) -> Iterator[Candidate]:
    """What the donors are good for, by the method that was asked for.

    share  rows that a blend computes at least, of those that are not exact; what no donor holds is computed in any case
    most   donors that a blend takes
    tail   rows that `top_layer` computes at least
    piece  see `Prepared`
    """
    donors = found.donors
    if ask.method == "adopt":
        # The donor's own prompt runs, from its own state.
        length = donors[0].num_tokens
        held = reusable(length, length, piece, donors[0].spans)
        plan = Plan("adopt", donors, found.match, tokens - (length - held))
        yield Candidate(plan, costs.prefix(held, length) if costs else None)
        return
    if ask.method == "top_layer":  # behind an exact prefix too its bottom layers run over the whole prompt
        rows = min(tokens, max(tail, found.new(tokens, 0)))
        plan = Plan("top_layer", donors, found.match, tokens - rows)
        yield Candidate(plan, costs.blending(rows, tokens, plan.loaded(tokens)) if costs else None)
        return
    yield from _blends(tokens, found, costs, share, most)
    if found.like:
        like = {meta.id for meta in found.like}
        for way in _blends(tokens, found.joined, costs, share, most):
            count = sum(meta.id in like for meta in way.plan.donors)
            if count:
                yield replace(way, plan=replace(way.plan, like=count))


def _blends(tokens: int, found: Found, costs: Costs | None, share: float, most: int) -> Iterator[Candidate]:
    """From the donors as they are, and behind the exact prefix of another chunk."""
    donors = found.donors
    hit, meta = found.prefix if found.prefix is not None else (None, None)
    if hit is None or meta is None or meta.id in [donor.id for donor in donors]:
        yield _blend(tokens, found, donors, hit.tokens if hit else 0, costs, share)
        return
    yield _blend(tokens, found, donors, 0, costs, share)
    if costs is not None and most > 1:  # an engine without costs holds its prefixes itself
        yield _blend(tokens, found, (*donors[: most - 1], meta), hit.tokens, costs, share)


def _blend(
    tokens: int, found: Found, donors: Sequence[ChunkMeta], kept: int, costs: Costs | None, share: float
) -> Candidate:
    rows = max(1, round((tokens - kept) * share), found.new(tokens, kept))
    seams = sum(first + length > kept for first, length in found.held or ())
    plan = Plan("blend", tuple(donors), found.match, tokens - rows, kept=kept, seams=seams)
    return Candidate(plan, costs.blending(rows, tokens, plan.loaded(tokens)) if costs else None)
