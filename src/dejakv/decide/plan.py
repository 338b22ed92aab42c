"""Donors of a request, the plans that could use them, and the decision between these plans.

Each method of reuse has a class of plans: here is their base, with the two that need no method.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejakv import plugins
from dejakv.config import SemanticCacheConfig
from dejakv.decide.answers import AnswerKey, KeptAnswer, answer_key
from dejakv.decide.guards.base import GuardVerdict
from dejakv.decide.levels.base import Match, Query, Status
from dejakv.errors import FormerAttribute, former_names, move_former_attribute
from dejakv.request import Prepared, Request, ReuseMode
from dejakv.store.base import KV, ROWS, PrefixHit, Rows, StateInfo
from dejakv.store.store import Store
from dejakv.trust.draw import HitDraw

P = TypeVar("P", bound="Plan")

EXACT_METHODS = frozenset({"none", "prefix", "exact"})
"""Methods of plans and records that cannot change an answer; any other one may."""

COPIED = "copied"
"""Level of donors that share runs of tokens with the prompt.

The runs are verified token by token, so no guard judges these donors.
"""

COSTS = "costs"
"""Beginning of the reason where an approximate plan may run and an exact one takes less time."""

NO_PREFIX, NO_DONOR = "no stored prompt begins like this one", "no donor"
"""Reasons of a miss without any refusal: for exact reuse, and where any donor would do."""

ReadSeconds = Callable[[str, Rows], float]
"""Function from a prompt's id and its rows to the seconds of reading them from a bucket.

Rows on this machine take 0 seconds (`Store.remote_read_seconds`).
"""

Accept = Callable[[NDArray[np.float32]], str]
"""Function that judges an approximate plan before anybody gets its answer.

It takes the log probabilities `[vocabulary]` of the answer's first token and returns the reason to
refuse the plan, or an empty string.
"""


@dataclass(frozen=True)
class ReuseRequest:
    """Reuse that is allowed for one request.

    Attributes
    ----------
    mode : ReuseMode
        `off` reuses exact prefixes alone, without comparison; any other is a method's name.
    threshold : float, optional
        Least score of a donor: a cosine for similar text, a share for copied text. It can only be
        stricter than the cache's threshold.
    named : tuple[str, ...]
        Ids of the only donors beside exact ones, best first, in the request's partition and epoch.
        No guard judges them.
    no_store : bool
        Whether nothing of this request is stored.
    donors : int, optional
        Maximum donors of a piecewise method. None takes the cache's setting.
    levels : bool
        Whether the levels are searched. Copied text is searched in any case.
    tells_first_token : bool
        Whether the engine can refuse a blend by its first token, so that an error bound may wait
        for that token.
    answers : AnswerKey, optional
        Key of a stored answer that may be returned. With None, answers are computed and not stored.
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
    def from_request(
        cls,
        request: Request,
        config: SemanticCacheConfig,
        *,
        donors: int | None = None,
        generation: str = "",
    ) -> "ReuseRequest":
        """Take each choice from the request, and the cache's setting where the request has none.

        Parameters
        ----------
        generation : str
            Digest of the engine's settings that the request does not name (`Engine.generation`).
        """
        mode = request.reuse or config.reuse

        answers = (
            answer_key(request.sampling, generation)
            if config.answers == "keep" and mode != "off"
            else None
        )
        return cls(
            mode, request.threshold, no_store=request.no_store, donors=donors, answers=answers
        )

    @property
    def method(self) -> str:
        """Name of the method of reuse for a donor."""
        return "exact" if self.mode == "off" else self.mode

    @property
    def piecewise(self) -> bool:
        """Whether state may be taken token by token from several donors, with the rest computed."""
        return plugins.load(plugins.METHODS, self.method).piecewise

    def max_donors(self, config: SemanticCacheConfig) -> int:
        """Return the maximum number of useful donors."""
        return min(config.blend_donors, self.donors or config.blend_donors) if self.piecewise else 1


@dataclass(frozen=True)
class DonorSearch:
    """Donors and exact prefix that a search returned.

    Attributes
    ----------
    match : Match, optional
        Best accepted donor.
    donors : tuple[StateInfo, ...]
        Descriptions of the donors, that of `match` first. Piecewise methods alone take several.
    prefix : tuple[PrefixHit, StateInfo], optional
        Longest exact prefix, even if loading it does not pay.
    verdicts : tuple[GuardVerdict, ...]
        Verdict on each candidate.
    copied : int, optional
        Tokens of the prompt that were verified in the donors. None if only text was compared.
    runs : tuple[tuple[int, int], ...]
        First token and length of each stretch of the prompt in the donors.
    short_runs : tuple[tuple[int, int], ...], optional
        The same with short stretches, to estimate a blend's rows (see `overlap`). None if unknown.
    """

    match: Match | None = None
    donors: tuple[StateInfo, ...] = ()
    prefix: tuple[PrefixHit, StateInfo] | None = None
    verdicts: tuple[GuardVerdict, ...] = ()
    copied: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    short_runs: tuple[tuple[int, int], ...] | None = None

    @property
    def refused(self) -> str:
        """Reason of the first rejection, that of the best candidate, if nothing matched."""
        if self.match is not None:
            return ""
        return next((f"{v.guard}: {v.reason}" for v in self.verdicts if v.decision == "reject"), "")

    def new_tokens(self, tokens: int, prefix_tokens: int) -> int:
        """Count the tokens behind the prefix that no donor has; 0 if unknown.

        Parameters
        ----------
        tokens : int
            Tokens of the prompt.
        prefix_tokens : int
            Tokens of its exact prefix.
        """
        if self.short_runs is None:
            return 0

        # Runs do not overlap, so their lengths add up.
        # A run may begin within the prefix: only what is behind it counts.
        return (
            tokens
            - prefix_tokens
            - sum(
                max(0, first + length - max(first, prefix_tokens))
                for first, length in self.short_runs
            )
        )


def is_approximate(method: str) -> bool:
    """Return whether a plan or a record of a method may have another answer."""
    return method not in EXACT_METHODS


@dataclass(frozen=True)
class Plan:
    """One way to run a request. Each method of reuse has a subclass.

    Attributes
    ----------
    method : str
        Name of the method, in records: how state becomes this request's.
    label : str
        Name of the method for readers; empty where it is `method`.
    piecewise : bool
        Whether state is taken token by token from several donors, and the rest computed.
    donors : tuple[StateInfo, ...]
        Prompts whose state is used, best first. Piecewise plans alone take several.
    match : Match, optional
        How the first donor was found.
    reused : int
        Prompt tokens that are not computed. For a piecewise plan it is an estimate until the token
        map is known.
    reason : str
        Why nothing is reused, or why an accepted donor is not used; else empty.
    seconds : float, optional
        Estimated time. None if unknown.
    read_seconds : float
        Part of `seconds` for reading donors' state from a bucket.
    max_read_seconds : float, optional
        Seconds of reading from a bucket after which an exact plan without it is as fast. None for
        no limit.
    refused : str
        Why the plan may not run. Empty if it may.
    answer : KeptAnswer, optional
        Stored answer of the donor, returned in place of a run. None means that the plan runs.
    """

    method: ClassVar[str]
    label: ClassVar[str] = ""
    piecewise: ClassVar[bool] = False

    donors: tuple[StateInfo, ...] = ()
    match: Match | None = None
    reused: int = 0
    reason: str = ""
    seconds: float | None = None
    read_seconds: float = 0.0
    max_read_seconds: float | None = None
    refused: str = ""
    answer: KeptAnswer | None = None

    @property
    def approximate(self) -> bool:
        """Whether the plan may change the answer."""
        return is_approximate(self.method)

    @property
    def name(self) -> str:
        """Name of the method for readers."""
        return self.label or self.method

    @property
    def provenance(self) -> str:
        """Name in logs and reports.

        It is `miss`, `hit (prefix)` or a hit with its level, such as `hit (text:exact)`,
        `hit (text:semantic)`, `hit (embedding:prompt)` and `hit (copied)`.
        """
        if self.match is None:
            return "hit (prefix)" if self.method == "prefix" else "miss"

        names = {"exact_text": "text:exact", "semantic_text": "text:semantic"}
        return f"hit ({names.get(self.match.level, self.match.level)})"

    def deadline(self) -> float | None:
        """Return when to give up a read from a bucket that begins now.

        Returns
        -------
        float or None
            Time by `time.monotonic`. None if the read may take any time.
        """
        return None if self.max_read_seconds is None else time.monotonic() + self.max_read_seconds

    def changed_to(self, kind: "type[P]", **changes: Any) -> "P":
        """Return a plan of another class with the same values, and with these changes.

        Parameters
        ----------
        kind : type[Plan]
            Class of the new plan.
        **changes : Any
            Fields of the new plan that differ.

        Returns
        -------
        Plan
            Plan of class `kind`.
        """
        shared = {item.name: getattr(self, item.name) for item in fields(Plan)}
        return kind(**{**shared, **changes})

    def loaded(self, tokens: int) -> int:
        """Return the tokens of state to load for a prompt of `tokens` tokens.

        Parameters
        ----------
        tokens : int
            Tokens of the prompt.

        Returns
        -------
        int
            Tokens of all donors.
        """
        return sum(meta.num_tokens for meta in self.donors)

    def __str__(self) -> str:

        seconds_text = "" if self.seconds is None else f" {self.seconds:.2g} s"
        return f"{self.name}{seconds_text}{f' ({self.refused})' if self.refused else ''}"


class FullPlan(Plan):
    """Full computation, which no engine refuses."""

    method, label = "none", "full"


class PrefixPlan(Plan):
    """Computation behind the longest exact prefix of the prompt, whoever stored it."""

    method, label = "prefix", "exact prefix"


@dataclass(frozen=True)
class PiecewisePlan(Plan):
    """Base of plans that take donors' state token by token, and compute the rest.

    Attributes
    ----------
    prefix_tokens : int
        Tokens of an exact prefix that stay as they are.
    config : SemanticCacheConfig, optional
        Settings of the method. None takes its defaults.
    max_row_share : float
        Share of rows, as a mean over layers, above which the next plan is better.
    accept : Accept, optional
        Judge of the first token. The engine asks it after the prefill, before a token of the answer
        is sent.
    """

    piecewise: ClassVar[bool] = True

    prefix_tokens: int = 0
    config: SemanticCacheConfig | None = None
    max_row_share: float = 1.0
    accept: Accept | None = None


FULL = FullPlan()
"""Full computation, which no engine refuses."""


class BoundTrial:
    """An approximate plan under an error bound, with its draw.

    Parameters
    ----------
    plan : Plan
        The plan on trial.
    draw : HitDraw, optional
        Whether to serve and to label the plan.
    """

    def __init__(self, plan: Plan, draw: HitDraw | None = None) -> None:
        self.plan = plan
        self._draw = draw

    @property
    def draw(self) -> HitDraw | None:
        """Whether to serve and to label the plan; None while its first token is awaited."""
        return self._draw


@dataclass(frozen=True)
class Decision:
    """How to run one request.

    Attributes
    ----------
    entry : StateInfo
        Description of the prompt's exact state, stored or not, without time, vectors and answer.
    ask : ReuseRequest
        Reuse that was allowed.
    plans : tuple[Plan, ...]
        Plans that may run, best first. The last is full computation.
    donor_search : DonorSearch
        Donors and prefix that the plans come from.
    query : Query
        Query that the levels saw.
    statuses : Mapping[str, Status]
        Hit, miss or skip by name of the level.
    seconds : float
        Time of the lookup.
    considered : tuple[Plan, ...]
        Every plan, with its seconds or the reason of its refusal.
    trial : BoundTrial, optional
        The chosen approximate plan under an error bound. It is in `plans` only if it may be served.
    """

    entry: StateInfo
    ask: ReuseRequest
    plans: tuple[Plan, ...]
    donor_search: DonorSearch
    query: Query
    statuses: Mapping[str, Status]
    seconds: float = 0.0
    considered: tuple[Plan, ...] = ()
    trial: BoundTrial | None = None

    @property
    def key(self) -> str:
        """Exact key of the prompt: the id under which its own state is stored."""
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
        """Better one of the exact prefix and full computation, which cannot change an answer."""
        return next(plan for plan in self.plans if plan.method in ("prefix", "none"))

    def without(self, reason: str) -> "Decision":
        """Return the decision after its best plan was refused for `reason`.

        Parameters
        ----------
        reason : str
            Why the best plan was refused.

        Returns
        -------
        Decision
            Decision whose best plan is the exact one.
        """
        best = self.plan
        considered = tuple(
            replace(plan, refused=reason) if plan is best else plan for plan in self.considered
        )

        # The exact plan next: another approximate one would need its own draw.
        plans = (
            replace(self.exact, reason=reason),
            *(plan for plan in self.plans[1:] if plan is not self.exact),
        )
        return replace(self, plans=plans, considered=considered)

    def __str__(self) -> str:
        """Return the plans and the best one, as in `full 0.3 s, blend 0.19 s: blend`."""
        return self.summary(self.plan)

    def summary(self, ran: Plan) -> str:
        """Return the plans considered and the name of the plan that ran, as one line.

        Parameters
        ----------
        ran : Plan
            Plan that ran.

        Returns
        -------
        str
            Text as `full 0.3 s, blend 0.19 s: blend`.
        """
        return f"{', '.join(map(str, self.considered))}: {ran.name}"


def serves_blends(meta: StateInfo, config: SemanticCacheConfig) -> bool:
    """Return whether a blend may take a stored prompt's rows.

    It may take exact state, and rows of a blend whose depth is at most `max_generation`.
    """
    return meta.kind == KV or (meta.kind == ROWS and meta.generation <= config.max_generation)


def final_statuses(statuses: Mapping[str, Status], plan: Plan) -> dict[str, Status]:
    """Return the status table for the plan that ran.

    A level whose donor was not used is a miss. `kv_cache` is a hit exactly if any state is used.
    """
    rows: dict[str, Status] = {}
    for name, status in statuses.items():
        unused = plan.match is None or (plan.match.level == COPIED and name != COPIED)
        rows[name] = "miss" if unused and status == "hit" else status

    rows["kv_cache"] = "miss" if plan.method == "none" else "hit"
    return rows


class RequestObserver:
    """Follower of requests, such as the error bound, a certificate or the caller's own.

    Both methods do nothing here.
    """

    decided = FormerAttribute("review_decision")
    answered = FormerAttribute("observe_answer")

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        move_former_attribute(cls, "decided", "review_decision")
        move_former_attribute(cls, "answered", "observe_answer")

    def review_decision(self, prepared: Prepared, decision: Decision) -> Decision:
        """Return the decision, with other plans if need be, before its first plan runs.

        Parameters
        ----------
        prepared : Prepared
            Request as the engine prepared it.
        decision : Decision
            Plans for the request.

        Returns
        -------
        Decision
            Decision by which the request runs.
        """
        return decision

    def observe_answer(self, prepared: Prepared, decision: Decision, plan: Plan, ran: Any) -> None:
        """Take note of the answer, with the plan that ran and its completion `ran`.

        Parameters
        ----------
        prepared : Prepared
            Request as the engine prepared it.
        decision : Decision
            Plans for the request.
        plan : Plan
            Plan that ran.
        ran : Any
            Completion of the plan.
        """


class StoringObserver(RequestObserver):
    """Observer that stores something of its own.

    Attributes
    ----------
    store : Store
        Its store. The cache purges it with its own, and closes it.
    """

    store: Store


__getattr__ = former_names(__name__, Ask="ReuseRequest", Observer="RequestObserver")
