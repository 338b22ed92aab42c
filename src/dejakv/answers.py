"""What a pipeline returns: the answer, and the record of what serving it took."""

import time
from dataclasses import dataclass, replace

from dejakv.engines.base import Completion, OnToken, Prepared
from dejakv.find.decision import Decision
from dejakv.find.ways import Plan
from dejakv.levels.base import Status
from dejakv.records import Record
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Answer:
    """The text, and what serving it took.

    text           with its label, where it has one (`Record.label`)
    cached_answer  the donor's own answer, for reports
    completion     what the engine returned
    decision       what it was run from, None where nothing was looked up
    """

    text: str
    token_ids: tuple[int, ...]
    record: Record
    cached_answer: str | None
    completion: Completion
    decision: Decision | None = None


class FirstToken:
    """Remembers when the first token came, and passes tokens on."""

    def __init__(self, began: float, on_token: OnToken | None) -> None:
        self.began = began
        self.seconds: float | None = None
        self._on_token = on_token

    def __call__(self, token: int, text: str) -> None:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.began
        if self._on_token is not None:
            self._on_token(token, text)


def answer_of(
    prepared: Prepared,
    completion: Completion,
    chosen: Plan,
    decision: Decision | None,
    clock: FirstToken,
    donors: tuple[ChunkMeta, ...] | None,
) -> Answer:
    """The answer with its record. `chosen`: what was run in the end; `donors`: whose state it used."""
    request = prepared.request
    latency = time.perf_counter() - clock.began
    prompt_tokens = len(prepared.token_ids)  # this prompt's own, also where a donor's was run in its place
    donor = donors[0] if donors else None
    match = chosen.match
    level = match.level if match else chosen.method if chosen.method == "prefix" else ""
    provenance = f"hit ({match.provenance})" if match else "hit (prefix)" if chosen.method == "prefix" else "miss"
    record = Record(
        request_id=request.id,
        key=decision.key if decision else "",
        method=chosen.method,
        level=level,
        provenance=provenance,
        donor=donor.id if donor else None,
        score=match.score if match else None,
        reason=chosen.reason,
        statuses=decision.statuses if decision else {},
        prompt_tokens=prompt_tokens,
        computed_tokens=completion.computed_tokens,
        reused_tokens=max(0, prompt_tokens - completion.computed_tokens),
        output_tokens=len(completion.token_ids),
        encoder_runs=completion.encoder_runs,
        ttft_ms=1e3 * (clock.seconds if clock.seconds is not None else latency),
        latency_ms=1e3 * latency,
        lookup_ms=1e3 * decision.seconds if decision else 0.0,
        inject_ms=1e3 * completion.inject_s,
        bytes_loaded=completion.bytes_loaded,
        approximate=chosen.approximate or completion.approximate,
        arithmetic=completion.arithmetic,
        bitwise=completion.bitwise and not chosen.approximate,
        plans=str(replace(decision, plan=chosen)) if decision else "",
        label=completion.label,
    )
    cached = donor.answer if donor and match else None
    return Answer(completion.label + completion.text, completion.token_ids, record, cached, completion, decision)


def fusion_status(prepared: Prepared, completion: Completion) -> Status:
    """Encoder outputs are `skip` where none were needed, `hit` where all came from the registry."""
    held = completion.prompt_tokens - completion.computed_tokens
    if all(span.start + span.length <= held for span in prepared.spans):
        return "skip"
    return "miss" if completion.encoder_runs else "hit"
