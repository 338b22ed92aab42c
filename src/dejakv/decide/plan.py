"""Donors found for a request, plans to use them, and the decision: all plans that may run, cheapest first.

Approximate plans must be asked for. Without costs, one that saves enough comes before the exact prefix, and that before full computation.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dejakv.config import ReuseMethod, SemanticCacheConfig
from dejakv.decide.answers import AnswerKey, KeptAnswer, answer_key, kept_answer
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.guards.base import Verdict
from dejakv.decide.levels.base import Match, Query, Status
from dejakv.identity import BLOCK_TOKENS
from dejakv.request import Prepared, Request, ReuseMode, reusable
from dejakv.settings import MAX_SHARE
from dejakv.store.base import INT8, KV, ROWS, ChunkMeta, PrefixHit, Rows
from dejakv.trust.draw import HitDraw

Method = Literal["none", "prefix", "exact", "adopt", "blend", "top_layer"]

PIECEWISE: frozenset[str] = frozenset({"blend", "top_layer"})
"""Methods that reuse donors' state token by token, and compute the rest."""

APPROXIMATE: frozenset[str] = PIECEWISE | {"adopt"}
"""Methods that may change an answer."""

COPIED = "copied"
"""Level of donors with runs of the prompt's tokens. These are verified, so no guard is asked."""

COSTS = "costs"
"""How the reason begins where an approximate plan may run and an exact one takes less time."""

NO_PREFIX, NO_DONOR = "no stored chunk begins like this prompt", "no donor"
"""Reasons of a miss behind which nothing was refused: of exact reuse, and where any donor would do."""

Away = Callable[[str, Rows], float]
"""Seconds to read rows of a chunk, by its id, from a bucket; 0 where they are on this machine (`Store.away`)."""

Accept = Callable[[NDArray[np.float32]], str]
"""Sees the log probabilities `[vocabulary]` of an answer's first token before anybody gets it. Returns why the plan is refused, or ""."""


@dataclass(frozen=True)
class ReuseRequest:
    """Reuse allowed for a request.

    mode       `off` reuses only exact prefixes, without comparison; others: see `ReuseMethod`
    threshold  least score of a donor: cosine of similar text, or share of copied text; only tightens the cache's
    named      ids of the only donors beside exact ones, best first, of the request's partition and epoch; no guard is asked
    no_store   store nothing of this request
    donors     maximum donors of a piecewise method; None: by the settings
    levels     False skips the levels; copied text is still searched
    tells_first_token  the engine can refuse a blend by its first token, so an error bound may wait for it
    answers    key of a stored answer that may be returned; None: answers are computed, and not stored
    """

    mode: ReuseMode = "exact"
    threshold: float | None = None
    named: tuple[str, ...] = ()
    no_store: bool = False
    donors: int | None = None
    levels: bool = True
    tells_first_token: bool = False
    answers: AnswerKey | None = None

    @classmethod
    def of(
        cls, request: Request, config: SemanticCacheConfig, *, donors: int | None = None, generation: str = ""
    ) -> "ReuseRequest":
        """The request's own choice, else the cache's. `generation`: see `Engine.generation`."""
        mode = request.reuse or config.reuse
        answers = answer_key(request.sampling, generation) if config.answers == "keep" and mode != "off" else None
        return cls(mode, request.threshold, no_store=request.no_store, donors=donors, answers=answers)

    @property
    def method(self) -> ReuseMethod:
        """Method of reuse for a donor."""
        return "exact" if self.mode == "off" else self.mode

    @property
    def piecewise(self) -> bool:
        """Whether state may be taken token by token, from several donors, with the rest computed."""
        return self.method in PIECEWISE

    def most_donors(self, config: SemanticCacheConfig) -> int:
        """Maximum number of useful donors."""
        return min(config.blend_donors, self.donors or config.blend_donors) if self.piecewise else 1


@dataclass(frozen=True)
class DonorSearch:
    """Donors and an exact prefix.

    match     best accepted donor; `donors`: its description first, more only for blend
    prefix    longest exact prefix, even if not worth loading
    verdicts  of the guards, on each candidate
    copied    tokens of the prompt verified in the donors; None if only text was compared
    runs      first token and length of each stretch of the prompt in the donors
    held      the same with short stretches, to estimate a blend's rows (see `overlap`); None: unknown
    """

    match: Match | None = None
    donors: tuple[ChunkMeta, ...] = ()
    prefix: tuple[PrefixHit, ChunkMeta] | None = None
    verdicts: tuple[Verdict, ...] = ()
    copied: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    held: tuple[tuple[int, int], ...] | None = None

    @property
    def refused(self) -> str:
        """Reason of the first rejection, the best candidate's, if there is no match."""
        if self.match is not None:
            return ""
        return next((f"{v.guard}: {v.reason}" for v in self.verdicts if v.decision == "reject"), "")

    def new(self, tokens: int, prefix_tokens: int) -> int:
        """Tokens of a prompt of `tokens` behind the first `prefix_tokens` in no donor; 0 if unknown."""
        if self.held is None:
            return 0
        # A run may begin within the prefix: only what is behind it counts.
        return (
            tokens
            - prefix_tokens
            - sum(max(0, first + length - max(first, prefix_tokens)) for first, length in self.held)
        )


@dataclass(frozen=True)
class Plan:
    """A way to run a request.

    method   `none`, `prefix`, `exact`, `adopt`, `blend` or `top_layer`
    donors   whose state is used, best first (more than one only for piecewise methods)
    reused   prompt tokens not computed (for piecewise methods: an estimate before the token map is known)
    reason   why nothing is reused, or a found donor is not used; else empty
    kept     tokens of an exact prefix left as they are by a blend
    seconds  estimated time; None: unknown
    away     of these, the time to read donors' state from a bucket
    within   seconds that reading from a bucket may take: then an exact plan without it is as fast; None: no limit
    refused  why it may not run; empty: it may
    config   settings of a piecewise method; None: its defaults
    most     maximum share of rows for a piecewise method to compute, the mean over layers: beyond it the next plan is better
    accept   asked by the engine after the prefill, before any token of the answer is sent
    answer   the donor's stored answer, to return in place of a run; None: run
    """

    method: Method
    donors: tuple[ChunkMeta, ...] = ()
    match: Match | None = None
    reused: int = 0
    reason: str = ""
    kept: int = 0
    seconds: float | None = None
    away: float = 0.0
    within: float | None = None
    refused: str = ""
    config: SemanticCacheConfig | None = None
    most: float = 1.0
    accept: Accept | None = None
    answer: KeptAnswer | None = None

    @property
    def approximate(self) -> bool:
        return self.method in APPROXIMATE

    @property
    def piecewise(self) -> bool:
        """Whether its method is in `PIECEWISE`."""
        return self.method in PIECEWISE

    @property
    def name(self) -> str:
        """Method in words."""
        if self.method == "blend" and self.kept:
            return "blend behind the exact prefix"
        return {"none": "full", "prefix": "exact prefix", "top_layer": "top layer"}.get(self.method, self.method)

    @property
    def provenance(self) -> str:
        """Name in logs and reports: `hit (text:exact)`, `hit (text:semantic)`, `hit (embedding:prompt)`, `hit (prefix)`, `miss`."""
        if self.match is None:
            return "hit (prefix)" if self.method == "prefix" else "miss"
        names = {"exact_text": "text:exact", "semantic_text": "text:semantic"}
        return f"hit ({names.get(self.match.level, self.match.level)})"

    def deadline(self) -> float | None:
        """When to give up a read from a bucket that begins now, by `time.monotonic`; None: never."""
        return None if self.within is None else time.monotonic() + self.within

    def loaded(self, tokens: int) -> int:
        """Tokens of state to load for a prompt of `tokens` tokens: a blend loads only the rows it uses."""
        donor_tokens = sum(meta.num_tokens for meta in self.donors)
        return min(donor_tokens, tokens) if self.method == "blend" else donor_tokens

    def __str__(self) -> str:
        seconds_text = "" if self.seconds is None else f" {self.seconds:.2g} s"
        return f"{self.name}{seconds_text}{f' ({self.refused})' if self.refused else ''}"


FULL = Plan("none")
"""Full computation. No engine refuses it."""


@dataclass
class BoundTrial:
    """An approximate plan under an error bound. `draw`: whether to serve and to label it; None until its first token is known."""

    plan: Plan
    draw: HitDraw | None = None


@dataclass(frozen=True)
class Decision:
    """How to run a request.

    entry       description of the prompt's exact state, stored or not: without time, vectors and answer
    plans       plans that may run, best first; the last is full computation
    considered  every plan, with its seconds or the reason of its refusal
    query       the levels' query
    seconds     time of the lookup
    trial       the chosen approximate plan under an error bound; in `plans` only if it may be served
    """

    entry: ChunkMeta
    ask: ReuseRequest
    plans: tuple[Plan, ...]
    found: DonorSearch
    query: Query
    statuses: Mapping[str, Status]
    seconds: float = 0.0
    considered: tuple[Plan, ...] = ()
    trial: BoundTrial | None = None

    @property
    def key(self) -> str:
        """Exact key of the prompt, the id of its own chunk."""
        return self.entry.id

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.entry.num_tokens

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.plans[0]

    @property
    def exact(self) -> Plan:
        """Best plan that changes no answer, apart from the prompt's own state: exact prefix or full computation."""
        return next(plan for plan in self.plans if plan.method in ("prefix", "none"))

    def without(self, reason: str) -> "Decision":
        """The decision after its best plan was refused."""
        best = self.plan
        considered = tuple(replace(plan, refused=reason) if plan is best else plan for plan in self.considered)
        # The exact plan next: another approximate one would need its own draw.
        plans = (replace(self.exact, reason=reason), *(plan for plan in self.plans[1:] if plan is not self.exact))
        return replace(self, plans=plans, considered=considered)

    def __str__(self) -> str:
        """`full 0.3 s, exact prefix 0.21 s, blend 0.19 s: blend`"""
        return self.told(self.plan)

    def told(self, ran: Plan) -> str:
        """Plans considered, and the plan that ran."""
        return f"{', '.join(map(str, self.considered))}: {ran.name}"


def serves_blends(meta: ChunkMeta, config: SemanticCacheConfig) -> bool:
    """Whether a blend may take a chunk's rows: exact state, or rows of a blend of at most `max_generation`; with `kv_quantization` state in 8
    bits, and nothing else."""
    if config.quantizes:
        return meta.kind == INT8 and meta.generation <= config.max_generation
    return meta.kind == KV or (meta.kind == ROWS and meta.generation <= config.max_generation)


def settled(statuses: Mapping[str, Status], plan: Plan) -> dict[str, Status]:
    """Status table for the plan that ran: a level without a used donor is no hit, and `kv_cache` is one exactly if state is used."""
    rows: dict[str, Status] = {}
    for name, status in statuses.items():
        unused = plan.match is None or (plan.match.level == COPIED and name != COPIED)
        rows[name] = "miss" if unused and status == "hit" else status

    rows["kv_cache"] = "miss" if plan.method == "none" else "hit"
    return rows


class Observer:
    """Follows requests: the error bound, a certificate, fusion states, or the caller's own. This one does nothing."""

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        """Called before the first plan runs; returns the decision, with other plans if need be."""
        return decision

    def answered(self, prepared: Prepared, decision: Decision, plan: Plan, ran: Any) -> None:
        """Called after the answer, with the plan that ran and its completion."""


def choose(
    tokens: int,
    donor_search: DonorSearch,
    ask: ReuseRequest,
    config: SemanticCacheConfig,
    *,
    same: bool = False,
    costs: ReuseCosts | None = None,
    piece: int = 1,
    read_seconds: Away = lambda id, rows: 0.0,
) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    """Choose plans for a prompt of `tokens` tokens. Returns those that may run, best first, and all considered.

    same    the donor's token ids and media equal the request's: exact reuse in any mode
    costs   of rows, bytes and blends; None: unknown
    piece   see `Prepared`
    read_seconds    see `Away`
    """
    exact_plans = _bounded(
        [_brought(plan, plan.reused, read_seconds) for plan in _exact_plans(tokens, donor_search, costs, piece)]
    )
    exact, candidates, reason = _cheapest(exact_plans), (), donor_search.refused
    fallbacks = (FULL,) if exact.donors else ()
    if donor_search.match is None or not donor_search.donors:
        pass
    elif same:
        donor, self_plan = donor_search.donors[0], exact_plans[-1]
        answer = kept_answer(donor, ask.answers)
        if answer is not None:
            self_plan = Plan("exact", (donor,), donor_search.match, tokens, seconds=_nothing(costs), answer=answer)
        # The prefix stands for the prompt itself, which can be read whole.
        elif donor_search.prefix is None or donor_search.prefix[0].donor != donor.id:
            donor_search = replace(donor_search, prefix=(PrefixHit(donor.id, tokens - 1), donor))
            self_plan = _bounded(
                [*exact_plans, _brought(_exact_plans(tokens, donor_search, costs, piece)[-1], tokens - 1, read_seconds)]
            )[-1]
        if self_plan.donors and self_plan.away and _cheapest([*exact_plans, self_plan]) is not self_plan:
            reason = f"{COSTS}: {', '.join(map(str, (*exact_plans, self_plan)))}: {exact.name}"
        elif self_plan.donors:
            again = self_plan.away > 0 and exact.donors == self_plan.donors  # what came too late is not read once more
            self_plan = replace(self_plan, method="exact", match=donor_search.match)
            return (self_plan, *(() if again else (exact,)), *fallbacks), (*exact_plans, self_plan)
        else:
            reason = _below(piece, "the prompt")
    elif ask.method == "exact":
        level = donor_search.match.level
        reason = (
            f"not asked for: {level} found a donor whose tokens differ, and reuse is exact (--reuse adopt would use it)"
        )
    else:
        candidates = [
            _brought(plan, tokens, read_seconds)
            for plan in _approximate_plans(tokens, donor_search, ask, config, costs, piece)
        ]
        candidates = [replace(plan, refused=_refusal(plan, tokens, exact, config.min_gain)) for plan in candidates]
        # With the exact plans, since a deadline follows from what they would cost.
        candidates = _bounded([*exact_plans, *candidates])[len(exact_plans) :]

        admitted = [plan for plan in candidates if not plan.refused]
        best = _cheapest([*exact_plans, *admitted])
        if best.approximate:
            whole = best
            if best.piecewise:  # with the settings that an engine needs
                whole = replace(best, config=config, most=most_computed(tokens, best, exact, config.min_gain, costs))
            return (whole, exact, *fallbacks), (*exact_plans, *(whole if plan is best else plan for plan in candidates))
        reason = (
            f"{COSTS}: {', '.join(map(str, (*exact_plans, *candidates)))}: {best.name}"
            if admitted
            else candidates[0].refused
        )

    if not exact.donors and donor_search.prefix is not None:
        if len(exact_plans) > 1:
            reason = reason or f"{COSTS}: {', '.join(map(str, exact_plans))}: {exact.name}"
        elif piece > 1 and (not reason or ask.method == "exact"):  # a donor that nobody asked for is no reason
            reason = _below(piece, "the prompt" if same else "the stored prefix")
    elif not exact.donors:
        reason = reason or (NO_PREFIX if ask.method == "exact" else NO_DONOR)

    return (replace(exact, reason=reason), *fallbacks), (*exact_plans, *candidates)


def _below(piece: int, subject: str) -> str:
    """Why exact state of a prompt or a prefix is not reused at all."""
    precision = " in low precision" if piece != BLOCK_TOKENS else ""  # else it is a prefix cache's block
    return f"{subject} is shorter than a piece of {piece} tokens, which is the least that is reused{precision}"


def _refusal(plan: Plan, tokens: int, exact: Plan, min_gain: int) -> str:
    """Why an approximate plan may not run: it saves too little beyond the exact one.

    Adoption must save `min_gain` of the whole prompt, and anything beyond the exact plan: else a short question behind a picture would
    never qualify.
    """
    gain, rows = plan.reused - exact.reused, tokens - plan.reused
    enough = gain >= min_gain or (plan.method == "adopt" and gain > 0 and plan.reused >= min_gain)
    if not enough and plan.answer is None:  # a stored answer is saved whole
        saved = f"{gain} tokens" if gain > 0 else "nothing"
        return f"min_gain: {plan.method} would save {saved} beyond the exact prefix, {min_gain} tokens are asked for"
    if plan.piecewise and rows > MAX_SHARE * tokens:
        return f"rows: {plan.method} would compute {rows / tokens:.0%} of the prompt, {MAX_SHARE:.0%} at most"
    return ""


def most_computed(tokens: int, chosen: Plan, exact: Plan, min_gain: int, costs: ReuseCosts | None) -> float:
    """Maximum share of rows, the mean over layers, in [0, 1]; beyond it the exact plan is cheaper or `min_gain` is missed."""
    rows = float(tokens - exact.reused - min_gain)
    if costs is not None:
        seconds = costs.prefix(exact.reused, tokens) if exact.donors else costs.full(tokens)
        rows = min(rows, costs.most_rows(seconds, tokens, chosen.loaded(tokens)))
    return min(1.0, max(0.0, rows / tokens))


def _brought(plan: Plan, max_tokens: int, read_seconds: Away) -> Plan:
    """The plan with the time to read state from a bucket, of at most `max_tokens` tokens of each donor."""
    if plan.seconds is None or not plan.donors:
        return plan

    extra_seconds = sum(read_seconds(donor.id, [(0, max_tokens)]) for donor in plan.donors)
    return replace(plan, seconds=plan.seconds + extra_seconds, away=extra_seconds) if extra_seconds else plan


def _bounded(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Plans with deadlines for what they read from a bucket: also for copies here, which may leave before they are read."""
    return tuple(replace(plan, within=_within(plan, plans)) if plan.donors else plan for plan in plans)


def _within(plan: Plan, plans: Sequence[Plan]) -> float | None:
    alternatives = [
        alternative
        for alternative in plans
        if alternative is not plan and not alternative.away and not alternative.approximate
    ]
    if plan.seconds is None or not alternatives:
        return None
    # The time that is left for reading until computing would have been as fast.
    return max(0.0, min(alternative.seconds or 0.0 for alternative in alternatives) - (plan.seconds - plan.away))


def _cheapest(plans: Sequence[Plan]) -> Plan:
    """Cheapest plan, ties to the first; without costs the one with most reuse."""
    # A single unknown time makes all of them incomparable.
    if any(plan.seconds is None for plan in plans):
        return max(plans, key=lambda plan: plan.reused)
    return min(plans, key=lambda plan: plan.seconds or 0.0)


def _exact_plans(tokens: int, donor_search: DonorSearch, costs: ReuseCosts | None, piece: int) -> list[Plan]:
    """Plans in full and behind the exact prefix. `piece`: see `Prepared`."""
    behind: list[Plan] = []
    if donor_search.prefix is not None:
        hit, meta = donor_search.prefix
        reused_tokens = reusable(hit.tokens, tokens, piece, meta.spans)
        if reused_tokens:
            seconds = costs.prefix(reused_tokens, tokens) if costs else None
            behind.append(Plan("prefix", (meta,), None, reused_tokens, seconds=seconds))
    return [replace(FULL, seconds=costs.full(tokens) if costs else None), *behind]


def _approximate_plans(
    tokens: int,
    donor_search: DonorSearch,
    ask: ReuseRequest,
    config: SemanticCacheConfig,
    costs: ReuseCosts | None,
    piece: int,
) -> Iterator[Plan]:
    """Plans with the donors, by the method asked for. Arguments: see `choose`."""
    donors = donor_search.donors
    if ask.method == "adopt":  # the donor's own prompt runs, from its own state
        answer = kept_answer(donors[0], ask.answers)
        if answer is not None:
            yield Plan("adopt", donors, donor_search.match, tokens, seconds=_nothing(costs), answer=answer)
            return

        length = donors[0].num_tokens
        reused_tokens = reusable(length, length, piece, donors[0].spans)
        seconds = costs.prefix(reused_tokens, length) if costs else None
        # The donor's own last tokens are computed, and count as computed of this prompt.
        yield Plan("adopt", donors, donor_search.match, tokens - (length - reused_tokens), seconds=seconds)
    elif ask.method == "top_layer":  # behind an exact prefix too its bottom layers run over the whole prompt
        rows = min(tokens, max(config.top_layer_tail, donor_search.new(tokens, 0)))
        yield _priced(Plan("top_layer", donors, donor_search.match, tokens - rows), tokens, costs)
    else:
        share, max_donors = config.blend.share, ask.most_donors(config)
        prefix_tokens, prefix = (
            (donor_search.prefix[0].tokens, donor_search.prefix[1])
            if donor_search.prefix is not None
            else (0, donors[0])
        )
        prefix_is_donor = prefix.id in [donor.id for donor in donors]
        yield _blend(tokens, donor_search, donors, prefix_tokens if prefix_is_donor else 0, costs, share)
        if not prefix_is_donor and costs is not None and max_donors > 1:
            # Behind the exact prefix of another chunk. An engine without costs holds its prefixes itself.
            yield _blend(tokens, donor_search, (*donors[: max_donors - 1], prefix), prefix_tokens, costs, share)


def _nothing(costs: ReuseCosts | None) -> float | None:
    """Seconds of a plan that runs nothing."""
    return None if costs is None else 0.0


def _blend(
    tokens: int,
    donor_search: DonorSearch,
    donors: Sequence[ChunkMeta],
    prefix_tokens: int,
    costs: ReuseCosts | None,
    share: float,
) -> Plan:
    # At least one row: the last one gives the answer.
    rows = max(1, round((tokens - prefix_tokens) * share), donor_search.new(tokens, prefix_tokens))
    return _priced(Plan("blend", tuple(donors), donor_search.match, tokens - rows, kept=prefix_tokens), tokens, costs)


def _priced(plan: Plan, tokens: int, costs: ReuseCosts | None) -> Plan:
    rows = tokens - plan.reused
    return replace(plan, seconds=costs.blending(rows, tokens, plan.loaded(tokens))) if costs else plan
