"""The record of one request. Everything printed, exported or plotted is computed from records."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dejakv.decide.levels.base import Status
from dejakv.decide.plan import NO_DONOR, NO_PREFIX, Decision, Method, Plan, settled
from dejakv.engines.base import Completion
from dejakv.request import Prepared

LONGEST_REASON = 200


def short(reason: str) -> str:
    """A reason as it leaves the process: on one line, of at most `LONGEST_REASON` characters."""
    # One line, so that no reason can forge a second record in a log.
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


@dataclass(frozen=True)
class Record:
    """One served request. Times in milliseconds, sizes in bytes, tokens of the prompt.

    key         exact key of the prompt, the id of its own chunk
    level       level of the donor (`prefix`, `exact_text`, `embedding:prompt`, ...), empty without a donor
    provenance  `hit (text:exact)`, `hit (prefix)`, `miss`, ... as in logs
    method      way of reuse; `prefix` also for a hit in the engine's own prefix cache (vLLM), which has no donor
    plans       plans considered, with estimated seconds: `full 0.3 s, blend 0.19 s: blend`
    order       given places of the prompt's parts, in the order of the run; empty: as given
    arithmetic  dtype of the model: `fp32`, `bf16`, `fp16`; empty if the engine does not tell
    bitwise     scores equal full computation in this engine bit for bit; otherwise rounding may differ, which in low precision
                now and then changes an answer
    answer      `computed`, or `stored`: the donor's answer was returned and nothing ran (the setting `answers`)
    reason      why a donor was not used (a guard's words, `min_gain`, `not asked for`) or that there was none, empty if it was used;
                shortened by `short`, free of prompt text
    """

    request_id: str
    key: str = ""
    method: Method = "none"
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
        object.__setattr__(self, "reason", short(self.reason))

    @property
    def refused(self) -> str:
        """Why a donor that was there is not used; empty without such a donor."""
        return "" if self.reason in (NO_PREFIX, NO_DONOR) else self.reason

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        decision: Decision | None,
        plan: Plan,
        completion: Completion,
        waited: float,
        stored: bool,
    ) -> "Record":
        """The record of an answer.

        decision  None without a lookup
        plan      the plan that ran
        waited    seconds from the request to the first plan's run
        """
        tokens, match = len(prepared.token_ids), plan.match  # this prompt's own, also where a donor's ran in its place
        if plan.method == "none" and completion.computed_tokens < completion.prompt_tokens:
            plan = replace(plan, method="prefix")  # the engine holds prefixes itself

        prefix = plan.method == "prefix"
        statuses = settled(decision.statuses, plan) if decision else {}
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
            plans=decision.told(plan) if decision else "",
            order=prepared.order,
        )


def _encoder_status(prepared: Prepared, completion: Completion) -> Status:
    """Encoder outputs are `skip` where none were needed, `hit` where all came from the registry."""
    reused_tokens = completion.prompt_tokens - completion.computed_tokens
    # Media within reused rows need no encoder.
    if all(span.start + span.length <= reused_tokens for span in prepared.spans):
        return "skip"
    return "miss" if completion.encoder_runs else "hit"


@dataclass(frozen=True)
class Answer:
    """The text, and the cost of serving it.

    cached_answer  the donor's own answer, for reports
    completion     the engine's result
    decision       its decision, None without a lookup
    """

    text: str
    token_ids: tuple[int, ...]
    record: Record
    cached_answer: str | None
    completion: Completion
    decision: Decision | None = None
