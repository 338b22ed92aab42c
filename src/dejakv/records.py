"""The record of one request. Everything printed, exported or plotted is computed from records."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dejakv.decide.levels.base import Status
from dejakv.decide.plan import NO_DONOR, NO_PREFIX, Decision, Plan, PrefixPlan, final_statuses
from dejakv.engines.base import Completion
from dejakv.request import Prepared

LONGEST_REASON = 200
"""Characters of a reason that leaves the process."""


def shorten_reason(reason: str) -> str:
    """Return a reason on one line of at most `LONGEST_REASON` characters, to leave the process."""
    # One line, so that no reason can forge a second record in a log.
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


@dataclass(frozen=True)
class Record:
    """One served request.

    Attributes
    ----------
    request_id : str
        Id of the request.
    key : str
        Exact key of the prompt, the id of its own entry.
    method : str
        Way of reuse; `prefix` also for a hit in the engine's own prefix cache (vLLM), which has no
        donor.
    level : str
        Level of the donor (`prefix`, `exact_text`, `embedding:prompt`, ...); empty without a donor.
    provenance : str
        `hit (text:exact)`, `hit (prefix)`, `miss`, ... as in logs.
    donor : str or None
        Id of the donor.
    score : float or None
        Score of the donor, if its level compares.
    reason : str
        Why a donor was not used (a guard's words, `min_gain`, `not asked for`), that there was
        none, or why the cache left a call alone; empty if the donor was used. Shortened by
        `shorten_reason`, free of prompt text.
    statuses : Mapping[str, Status]
        Status of each level.
    prompt_tokens, computed_tokens, reused_tokens, output_tokens : int
        Tokens of the prompt, those computed and reused of it, and tokens of the answer.
    encoder_runs : int
        Pictures that went through the vision tower.
    ttft_ms, latency_ms : float
        Milliseconds from the request to the first and to the last token.
    lookup_ms, inject_ms : float
        Milliseconds of the lookup (with the choice of an order), and of putting state into the
        model.
    bytes_loaded : int
        Bytes of state put into the model.
    stored : bool
        Whether the prompt's exact state was queued for storage.
    approximate : bool
        Whether the answer is approximate.
    arithmetic : str
        Dtype of the model: `fp32`, `bf16`, `fp16`; empty if the engine does not tell.
    bitwise : bool
        Whether scores equal full computation in this engine bit for bit. Otherwise rounding may
        differ, which in low precision now and then changes an answer.
    answer : {"computed", "stored"}
        `stored`: the donor's answer was returned and nothing ran (the setting `answers`).
    plans : str
        Plans considered, with estimated seconds: `full 0.3 s, blend 0.19 s: blend`.
    order : tuple[int, ...]
        Given places of the prompt's parts, in the order of the run; empty if they ran as given.
    """

    request_id: str
    key: str = ""
    method: str = "none"
    level: str = ""
    provenance: str = "miss"
    donor: str | None = None
    score: float | None = None
    reason: str = ""
    statuses: Mapping[str, Status] = field(default_factory=dict[str, Status])
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    encoder_runs: int = 0
    ttft_ms: float = 0.0
    latency_ms: float = 0.0
    lookup_ms: float = 0.0
    inject_ms: float = 0.0
    bytes_loaded: int = 0
    stored: bool = False
    approximate: bool = False
    arithmetic: str = ""
    bitwise: bool = False
    answer: Literal["computed", "stored"] = "computed"
    plans: str = ""
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", shorten_reason(self.reason))

    @property
    def refused(self) -> str:
        """The `reason`, or empty if it only says that no donor was found."""
        return "" if self.reason in (NO_PREFIX, NO_DONOR) else self.reason

    @property
    def span_attributes(self) -> dict[str, Any]:
        """The record as attributes of the request's span (`tracing`)."""
        return {
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.reused_tokens,
            "dejakv.method": self.method,
            "dejakv.level": self.level,
            "dejakv.provenance": self.provenance,
            "dejakv.score": self.score,
            "dejakv.reason": self.reason,
            "dejakv.approximate": self.approximate,
            "dejakv.computed_tokens": self.computed_tokens,
            "dejakv.stored": self.stored,
            "dejakv.ttft_seconds": self.ttft_ms / 1000,
        }

    @classmethod
    def from_completion(
        cls,
        prepared: Prepared,
        decision: Decision | None,
        plan: Plan,
        completion: Completion,
        waited: float,
        stored: bool,
    ) -> "Record":
        """Make the record of an answer.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        decision : Decision or None
            None without a lookup.
        plan : Plan
            The plan that ran.
        completion : Completion
            The engine's result.
        waited : float
            Seconds from the request to the first plan's run.
        stored : bool
            Whether the prompt's exact state was queued for storage.

        Returns
        -------
        Record
            The record of this request.
        """
        # This prompt's own tokens, also where a donor's ran in its place.
        tokens, match = len(prepared.token_ids), plan.match
        # Less was computed without a donor: the engine holds prefixes itself.
        if plan.method == "none" and completion.computed_tokens < completion.prompt_tokens:
            plan = PrefixPlan(**{each.name: getattr(plan, each.name) for each in fields(plan)})

        prefix = plan.method == "prefix"
        statuses = final_statuses(decision.statuses, plan) if decision else {}
        # No provider read fusion modules: then the status tells of encoder outputs.
        if statuses.get("fusion") == "skip":
            statuses["fusion"] = _encoder_status(prepared, completion)

        return cls(
            request_id=prepared.request.id,
            key=decision.key if decision else "",
            method=plan.method,
            level=match.level if match else "prefix" if prefix else "",
            provenance=plan.provenance,
            donor=plan.donors[0].id if plan.donors else None,
            score=match.score if match else None,
            reason=plan.reason,
            statuses=statuses,
            prompt_tokens=tokens,
            computed_tokens=completion.computed_tokens,
            reused_tokens=max(0, tokens - completion.computed_tokens),
            output_tokens=len(completion.token_ids),
            encoder_runs=completion.encoder_runs,
            ttft_ms=1e3 * (waited + completion.ttft_s),
            latency_ms=1e3 * (waited + completion.latency_s),
            lookup_ms=1e3 * (prepared.order_s + (decision.seconds if decision else 0.0)),
            inject_ms=1e3 * completion.inject_s,
            bytes_loaded=completion.bytes_loaded,
            stored=stored,
            approximate=plan.approximate or completion.approximate,
            arithmetic=completion.arithmetic,
            bitwise=completion.bitwise and not plan.approximate,
            answer="stored" if plan.answer is not None else "computed",
            plans=decision.summary(plan) if decision else "",
            order=prepared.order,
        )


def _encoder_status(prepared: Prepared, completion: Completion) -> Status:
    """Tell whether encoder outputs were needed (`skip` if not), and all came from the registry."""
    reused_tokens = completion.prompt_tokens - completion.computed_tokens

    # Media within reused rows need no encoder.
    if all(span.start + span.length <= reused_tokens for span in prepared.spans):
        return "skip"
    return "miss" if completion.encoder_runs else "hit"


@dataclass(frozen=True)
class Answer:
    """The answer to a request, and the cost of serving it.

    Attributes
    ----------
    text : str
        The answer.
    token_ids : tuple[int, ...]
        Tokens of the answer.
    record : Record
        What happened.
    cached_answer : str or None
        The donor's own answer, for reports.
    completion : Completion
        The engine's result.
    decision : Decision or None
        The cache's decision; None without a lookup.
    """

    text: str
    token_ids: tuple[int, ...]
    record: Record
    cached_answer: str | None
    completion: Completion
    decision: Decision | None = None
