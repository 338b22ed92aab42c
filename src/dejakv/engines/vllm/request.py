"""State of one live request on the scheduler side, the result of its lookup, and counters."""

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from dejakv.decide.bound import CERTIFICATE
from dejakv.decide.plan import Decision
from dejakv.engines.vllm.messages import LoadResult
from dejakv.engines.vllm.settings import RequestOptions
from dejakv.engines.vllm.upstream import RenamedBlocks
from dejakv.records import shorten_reason
from dejakv.store.base import StateInfo
from dejakv.store.selection import DONORS
from dejakv.tracing import OpenSpan

MEDIA_DONORS = "only prompts with media have its text, and a blend takes no state from those"


@dataclass(frozen=True)
class LookupResult:
    """Result of a lookup.

    Attributes
    ----------
    method : str
        `none`, `exact` (token for token, perhaps a prefix) or `blend`.
    donors : tuple[str, ...]
        Ids of stored states to take from, the best first. Only a blend has several.
    tokens : int
        Leading tokens of the prompt that the donors' state covers; for a blend all mapped ones.
    key : str
        Exact key of the prompt, empty if none could be made.
    save : StateInfo or None
        Description of the prompt's own state to store; None if it is not to be stored.
    save_behind : StateInfo or None
        Description of the prompt whose answer's state is to be stored; None if it is not.
    seconds : float
        Duration of the lookup.
    donor_runs : tuple[tuple[int, int], ...] or None
        First token and length of each run of the prompt in a blend's donors; None if unknown.
    blend_depth : int
        One more than the highest depth of the donors.
    fallback : LookupResult or None
        Exact prefix to take if the blend turns out to be impossible.
    rows : int
        Estimated tokens that a blend recomputes.
    read_seconds : float
        Estimated seconds to read the donors' state from a bucket; 0 if it is on this machine.
    snapshot : str
        Id of the recurrent state behind `tokens`; empty for a model without such layers.
    kv_tokens : int
        Of a model with recurrent layers: leading tokens whose KV entries are stored, in whole
        blocks. They are more than `tokens` where no snapshot stands behind them.
    snapshots : Mapping[int, StateInfo]
        Snapshots to store, by the number of tokens before them.
    """

    method: str = "none"
    donors: tuple[str, ...] = ()
    tokens: int = 0
    level: str = ""
    score: float | None = None
    reason: str = ""
    key: str = ""
    save: StateInfo | None = None
    save_behind: StateInfo | None = None
    seconds: float = 0.0
    donor_runs: tuple[tuple[int, int], ...] | None = None
    blend_depth: int = 0
    fallback: "LookupResult | None" = None
    rows: int = 0
    read_seconds: float = 0.0
    snapshot: str = ""
    kv_tokens: int = 0
    snapshots: Mapping[int, StateInfo] = field(default_factory=dict[int, StateInfo])

    @property
    def blend_forbidden(self) -> bool:
        """Whether a certificate forbids the blend."""
        return self.reason.startswith(CERTIFICATE)

    @property
    def exact(self) -> "LookupResult":
        """The exact part of this result, without a blend."""
        return self if self.method != "blend" else self.fallback or LookupResult()

    def without_blend(self, reason: str = "") -> "LookupResult":
        """Return the exact part of this result; what is to be stored stays as it is."""
        exact = self.exact
        return replace(
            exact,
            reason=reason or exact.reason,
            key=self.key,
            save=self.save,
            save_behind=self.save_behind,
        )

    @property
    def stored_tokens(self) -> int:
        """Leading tokens whose exact KV entries are stored."""
        return max(self.exact.tokens, self.kv_tokens)

    @property
    def lacks_snapshot(self) -> bool:
        """Whether all KV entries to store are stored, and the state behind them is not."""
        return (
            self.save is not None
            and self.save.num_tokens in self.snapshots
            and self.kv_tokens >= self.save.num_tokens
        )

    def count_saved(self, first: int, stop: int) -> int:
        """Count the tokens from `first` to `stop - 1` that need not be computed."""
        if self.donor_runs is None:
            return max(0, stop - first)
        return sum(
            max(0, min(begin + length, stop) - max(begin, first))
            for begin, length in self.donor_runs
        )


def as_lookup_result(decision: Decision, no_blend: str = "") -> LookupResult:
    """Convert a decision of the cache to a lookup's result.

    Parameters
    ----------
    decision : Decision
        Plans for the prompt, and its donor search.
    no_blend : str
        Why a requested blend was not searched for; empty if it was.
    """
    chosen = decision.plan
    reason = no_blend or chosen.reason
    exact = LookupResult(reason=reason, key=decision.key)

    # Made in any case, since a blend that is not possible falls back to it.
    if decision.donor_search.prefix is not None:
        hit, meta = decision.donor_search.prefix
        whole = meta.id == decision.key

        level = "exact_text" if whole else "prefix"
        exact = LookupResult(
            "exact", (meta.id,), hit.tokens, level, 1.0, "" if whole else reason, decision.key
        )

    if chosen.method != "blend" or chosen.match is None:
        return exact

    # Behind a picture a token's position need not be its place (M-RoPE), and a picture's rows do
    # not follow from its tokens: neither can be moved or checked.
    text_donors = [meta for meta in chosen.donors if not meta.spans]
    if not text_donors:
        return replace(exact, reason=MEDIA_DONORS)

    donors, match = tuple(meta.id for meta in text_donors), chosen.match
    fallback = exact if exact.donors else None
    blend_depth = 1 + max(meta.generation for meta in text_donors)
    donor_runs = decision.donor_search.short_runs
    blend = LookupResult(
        "blend",
        donors,
        decision.tokens,
        match.level,
        match.score,
        key=decision.key,
        fallback=fallback,
    )
    return replace(
        blend, rows=decision.tokens - chosen.reused, donor_runs=donor_runs, blend_depth=blend_depth
    )


@dataclass
class RequestState:
    """State of a live request.

    Attributes
    ----------
    lookup : Future[LookupResult] or None
        The running or ended lookup; None before one was submitted.
    deadline : float
        Monotonic time after which the lookup counts as a miss.
    settled : bool
        No further load: it was loaded, it failed, or there is nothing to load.
    renamed_blocks : RenamedBlocks or None
        Where its blocks are filed if some have approximate names.
    shared_tokens : int
        Tokens that vLLM's prefix cache held under such names.
    blend_depth : int
        How often approximate state went into its blocks.
    cached_blocks : int
        Blocks of its prompt that vLLM's prefix cache had when the queue looked last.
    wait_deadline : float
        Monotonic time until which it waits for blocks that another request makes; 0.0 before it
        waits.
    waits_for_maker : bool
        Whether it waits for such blocks now.
    ordered_tokens : int
        Tokens that a load was ordered for.
    load_result : LoadResult or None
        The worker's result of the last load.
    stored_rows : list[StateInfo]
        Rows of its blend that are stored for later blends.
    reason : str
        Why no state, or less than possible, was reused; for the client.
    saved : bool
        All that is to be stored was ordered or given up.
    saved_answer : StateInfo or None
        Description of prompt and answer as far as they were ordered last; None before any order.
    weights_generation : int
        Generation in which the request came. After a reset its state is of no use (`generations`).
    loadable : bool
        State may be loaded for it, and again after each preemption.
    preemptions : int
        How often vLLM had taken its blocks at the latest lookup.
    save : StateInfo or None
        Description of its state at the first lookup, if that was before a preemption.
    trace : OpenSpan or None
        Span of the request; None where traces are off.
    load_trace : OpenSpan or None
        Span of the load under way.
    """

    request: Any
    options: RequestOptions
    lookup: "Future[LookupResult] | None"
    deadline: float
    lookup_result: LookupResult | None = None
    settled: bool = False
    renamed_blocks: RenamedBlocks | None = None
    shared_tokens: int = 0
    blend_depth: int = 0
    cached_blocks: int = 0
    wait_deadline: float = 0.0
    waits_for_maker: bool = False
    ordered_tokens: int = 0
    load_result: LoadResult | None = None
    stored_rows: list[StateInfo] = field(default_factory=list[StateInfo])
    reason: str = ""
    saved: bool = False
    saved_answer: StateInfo | None = None
    weights_generation: int = 0
    loadable: bool = True
    preemptions: int = 0
    save: StateInfo | None = None
    trace: OpenSpan | None = None
    load_trace: OpenSpan | None = None

    def start_again(self, lookup: "Future[LookupResult]", deadline: float) -> None:
        """Forget the load that a preemption took, and wait for another lookup.

        Which state of the prompt is to be stored stays as it was.
        """
        assert self.lookup_result is not None
        self.lookup, self.deadline, self.save = lookup, deadline, self.lookup_result.save
        self.lookup_result, self.settled, self.reason = None, False, ""

    def take(self, lookup_result: LookupResult) -> None:
        """Take a lookup's result; after a preemption an exact request stays exact."""
        # Tokens of its answer were computed behind exact state already.
        if self.preemptions:
            lookup_result = replace(
                lookup_result if self.approximate else lookup_result.without_blend(),
                save=self.save,
            )
        self.lookup_result = lookup_result

    @property
    def expected(self) -> LookupResult:
        """Result of the lookup as far as it may still be used."""
        if self.settled or self.lookup is None or not self.lookup.done():
            return LookupResult()
        return self.lookup_result or self.lookup.result()

    @property
    def tokens_saved(self) -> int:
        """Tokens that nobody computed thanks to the load, once it is over."""
        return (
            0
            if self.load_result is None
            else max(0, self.ordered_tokens - self.load_result.computed)
        )

    @property
    def approximate(self) -> bool:
        """Whether blended state may be in its blocks."""
        return self.renamed_blocks is not None

    def to_save(self) -> StateInfo | None:
        """Return the description of the prompt's state to store, or None if it is not stored."""
        # A request may end before vLLM asked for its lookup's result.
        if self.lookup_result is None and self.lookup is not None and self.lookup.done():
            self.lookup_result = self.lookup.result()

        return None if self.lookup_result is None else self.lookup_result.save

    def to_save_behind(self) -> StateInfo | None:
        """Return the description of the prompt whose answer is stored, or None if it is not."""
        return None if self.lookup_result is None else self.lookup_result.save_behind

    @property
    def informs_client(self) -> bool:
        """Whether the response tells the client about reuse.

        It does if the client asked for that, or if the answer is approximate. Other responses stay
        as vLLM makes them, since routers take `kv_transfer_params` in a response for orders.
        """
        params = self.request.kv_transfer_params
        choices = params.get("dejakv") if isinstance(params, Mapping) else None
        quiet = isinstance(choices, Mapping) and choices.get("quiet") is True
        return self.approximate or (
            isinstance(params, Mapping) and "dejakv" in params and not quiet
        )

    def response_fields(self) -> dict[str, Any]:
        """Return the fields of `kv_transfer_params.dejakv` for the client."""
        lookup_result = self.lookup_result or LookupResult()
        ordered_tokens = self.ordered_tokens
        load_result = self.load_result or LoadResult("", 0, 0.0)
        # The worker's list comes first, since it may have left out donors.
        donors = (load_result.donors or lookup_result.donors) if ordered_tokens else ()
        # Blocks of another request's blend make an answer approximate without a load.
        method, level = ("blend", "prefix") if self.shared_tokens else ("none", "")

        return {
            "method": lookup_result.method if ordered_tokens else method,
            "level": lookup_result.level if ordered_tokens else level,
            "donor": donors[0] if donors else None,
            "donors": list(donors),
            "score": lookup_result.score if ordered_tokens else None,
            "tokens_reused": self.shared_tokens + self.tokens_saved,
            "tokens_recomputed": load_result.computed,
            "bytes_loaded": load_result.nbytes,
            "load_s": load_result.seconds,
            "approximate": self.approximate,
            "rows_kept": sum(meta.num_tokens for meta in self.stored_rows),
            "kept": self._kept(),
            "reason": shorten_reason(self.reason),
            "prompt_key": lookup_result.key,
        }

    def end_load_trace(self, load_result: LoadResult) -> None:
        """End the span of a load, with what came of it."""
        if self.load_trace is not None:
            attributes = {
                "dejakv.loaded_bytes": load_result.nbytes,
                "dejakv.computed_tokens": load_result.computed,
                "dejakv.reason": shorten_reason(load_result.problem),
            }
            self.load_trace.end(attributes, short(load_result.problem))
            self.load_trace = None

    def end_trace(self) -> None:
        """End the spans of a request that has ended, with what was reused and why not more."""
        if self.trace is None:
            return
        self.end_load_trace(LoadResult("", 0, 0.0, problem="aborted"))
        fields = self.response_fields()
        self.trace.end(
            {
                "gen_ai.usage.input_tokens": self.request.num_prompt_tokens,
                "gen_ai.usage.output_tokens": self.request.num_output_tokens,
                "dejakv.method": fields["method"],
                "dejakv.level": fields["level"],
                "dejakv.score": fields["score"],
                "dejakv.reason": fields["reason"],
                "dejakv.approximate": fields["approximate"],
                "dejakv.reused_tokens": fields["tokens_reused"],
                "dejakv.loaded_bytes": fields["bytes_loaded"],
            }
        )

    def _kept(self) -> dict[str, Any]:
        """Describe the stored rows: first, stop and id of each run, their donors and depth."""
        if not self.stored_rows:
            return {}
        first = self.stored_rows[0]
        runs = [
            (meta.position, meta.position + meta.num_tokens, meta.id) for meta in self.stored_rows
        ]
        return {
            "runs": runs,
            "donors": list(first.metadata[DONORS]),
            "generation": first.generation,
        }


class ConnectorCounts:
    """Counters of the events since the last `take`, by `name` or `name|label`.

    Used in the engine loop alone.
    """

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._absences_time = time.monotonic()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to a counter."""
        key = f"{name}|{short(label)}" if label else name
        self._values[key] += amount

    def looked_up(self, lookup_result: LookupResult) -> None:
        """Count a lookup, its time, and a blend that a certificate withheld."""
        self.add("lookups", lookup_result.method if lookup_result.method != "none" else "miss")
        self.add("lookup_seconds", amount=lookup_result.seconds)
        if lookup_result.blend_forbidden:
            self.add("withheld", lookup_result.reason)

    def loaded(self, load_result: LoadResult) -> None:
        """Count a load that ended, or its failure."""
        if load_result.problem:
            self.add("load_failures", load_result.problem)
            return
        self.add("loads")
        self.add("loaded_bytes", amount=load_result.nbytes)
        self.add("load_seconds", amount=load_result.seconds)
        self.add("loaded_donors", amount=len(load_result.donors))
        for why in load_result.left_out:
            self.add("donors_left_out", why)
        if load_result.unpinned:
            self.add("unpinned_loads")

    def absent(self, absences: Mapping[str, float]) -> None:
        """Count the part of each outage (`base.OUTAGES`) since the last call.

        Parameters
        ----------
        absences : Mapping[str, float]
            Seconds since each present outage began, by counter; 0 without an outage.
        """
        now = time.monotonic()
        for name, seconds in absences.items():
            # An absence may be older than the last call, which counted its part.
            if seconds:
                self.add(name, amount=min(seconds, now - self._absences_time))
        self._absences_time = now

    def take(self) -> dict[str, float]:
        """Return the counters and start again at zero."""
        values, self._values = dict(self._values), defaultdict(float)
        return values


def short(label: str) -> str:
    """Cut a label at a colon, before its variable part, so that the number of series is small."""
    return label.split(":")[0][:60]
