"""The scheduler side's state of one live request, and the result of its lookup."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from dejakv.decide.bound import CERTIFICATE
from dejakv.decide.plan import Decision
from dejakv.engines.vllm.messages import LoadResult
from dejakv.engines.vllm.settings import RequestOptions
from dejakv.engines.vllm.upstream import RenamedBlocks
from dejakv.records import short
from dejakv.store.base import ChunkMeta
from dejakv.store.selection import DONORS


@dataclass(frozen=True)
class LookupResult:
    """Result of a lookup.

    method  `none`, `exact` (token for token, perhaps a prefix) or `blend`
    donors  stored chunks whose state is taken, the best first; more than one for blend alone
    tokens  leading tokens of the prompt covered by the donors' state (for blend: all that is mapped)
    rows    of a blend: tokens to compute, an estimate
    save    description of the prompt's own state, to store it; None: not to be stored
    key     the prompt's exact key, empty if it could not be made
    held    first token and length of each run of the prompt in the donors of a blend; None: unknown
    generation  one more than the highest of the donors
    instead of a blend: the exact prefix to take if the blend turns out not to be possible
    away    seconds to read the donors' state from a bucket, an estimate; 0: on this machine
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
    held: tuple[tuple[int, int], ...] | None = None
    generation: int = 0
    instead: "LookupResult | None" = None
    rows: int = 0
    away: float = 0.0

    @property
    def withheld(self) -> bool:
        """Whether a certificate forbids its blend."""
        return self.reason.startswith(CERTIFICATE)

    @property
    def exact(self) -> "LookupResult":
        """Its exact part, without a blend."""
        return self if self.method != "blend" else self.instead or LookupResult()

    def saves(self, first: int, stop: int) -> int:
        """Tokens from `first` to `stop` without a need to compute them."""
        if self.held is None:
            return max(0, stop - first)
        return sum(max(0, min(begin + length, stop) - max(begin, first)) for begin, length in self.held)


def told(decision: Decision, no_blend: str = "") -> LookupResult:
    """The decision as the scheduler takes it. `no_blend`: why no requested blend was looked for."""
    chosen = decision.plan
    reason = no_blend or chosen.reason
    exact = LookupResult(reason=reason, key=decision.key)
    if decision.found.prefix is not None:
        hit, meta = decision.found.prefix
        whole = meta.id == decision.key
        level = "exact_text" if whole else "prefix"
        exact = LookupResult("exact", (meta.id,), hit.tokens, level, 1.0, "" if whole else reason, decision.key)

    if chosen.method != "blend" or chosen.match is None:
        return exact

    donors, match = tuple(meta.id for meta in chosen.donors), chosen.match
    fallback = exact if exact.donors else None
    blend_depth, donor_runs = 1 + max(meta.generation for meta in chosen.donors), decision.found.held
    blend = LookupResult("blend", donors, decision.tokens, match.level, match.score, key=decision.key, instead=fallback)
    return replace(blend, rows=decision.tokens - chosen.reused, held=donor_runs, generation=blend_depth)


@dataclass
class RequestState:
    """What is known of a live request.

    used      tokens that a load was ordered for
    names     where its blocks are filed if some have approximate names (`names`)
    shared    tokens that vLLM's prefix cache held under such names
    blended   how often approximate state went into its blocks
    held      blocks of its prompt that vLLM's prefix cache had when the queue looked
    shares_until  how long it waits for blocks that another request makes, 0.0: it did not yet
    shares    it waits for them now
    loaded    what the worker said of the last load
    kept      its rows that are stored for later blends, if it was blended
    settled   no further load: it was loaded, it failed, or there is nothing to load
    loadable  state may be loaded for it, and again after each preemption
    preempted how often vLLM had taken its blocks at the latest lookup
    save      description of its state at the first lookup, if that was before a preemption
    generation in which the request came; after a reset its state is of no use (`generations`)
    """

    request: Any
    wish: RequestOptions
    lookup: "Future[LookupResult] | None"
    deadline: float
    found: LookupResult | None = None
    settled: bool = False
    names: RenamedBlocks | None = None
    shared: int = 0
    blended: int = 0
    held: int = 0
    shares_until: float = 0.0
    shares: bool = False
    used: int = 0
    loaded: LoadResult | None = None
    kept: list[ChunkMeta] = field(default_factory=list[ChunkMeta])
    reason: str = ""
    saved: bool = False
    generation: int = 0
    loadable: bool = True
    preempted: int = 0
    save: ChunkMeta | None = None

    def start_again(self, lookup: "Future[LookupResult]", deadline: float) -> None:
        """Forget the load that a preemption took, for another lookup. What of the prompt is to be stored stays as it was."""
        assert self.found is not None
        self.lookup, self.deadline, self.save = lookup, deadline, self.found.save
        self.found, self.settled, self.reason = None, False, ""

    def take(self, lookup_result: LookupResult) -> None:
        """Take a lookup's result. A request that goes on after a preemption stays exact if it was."""
        if self.preempted:
            lookup_result = replace(lookup_result if self.approximate else lookup_result.exact, save=self.save)
        self.found = lookup_result

    @property
    def expected(self) -> LookupResult:
        """Its lookup's result, as far as it may still be used."""
        if self.settled or self.lookup is None or not self.lookup.done():
            return LookupResult()
        return self.found or self.lookup.result()

    @property
    def spared(self) -> int:
        """Tokens saved by its load, once it is over."""
        return 0 if self.loaded is None else max(0, self.used - self.loaded.computed)

    @property
    def approximate(self) -> bool:
        """Whether blended state may be in its blocks."""
        return self.names is not None

    def to_save(self) -> ChunkMeta | None:
        """Description of the prompt's state to store; None: it is not stored."""
        # A request may end before vLLM asked for its lookup's result.
        if self.found is None and self.lookup is not None and self.lookup.done():
            self.found = self.lookup.result()
        return None if self.found is None else self.found.save

    @property
    def tells(self) -> bool:
        """Whether the client is told: if it asked, or if its answer is approximate. Other responses stay as vLLM makes them, since
        routers take `kv_transfer_params` in a response for orders."""
        params = self.request.kv_transfer_params
        choices = params.get("dejakv") if isinstance(params, Mapping) else None
        quiet = isinstance(choices, Mapping) and choices.get("quiet") is True
        return self.approximate or (isinstance(params, Mapping) and "dejakv" in params and not quiet)

    def told(self) -> dict[str, Any]:
        """Fields of `kv_transfer_params` for the client."""
        lookup_result = self.found or LookupResult()
        ordered_tokens = self.used
        load_result = self.loaded or LoadResult("", 0, 0.0)
        # The worker's list comes first, since it may have left out donors.
        donors = (load_result.donors or lookup_result.donors) if ordered_tokens else ()
        # Blocks of another request's blend make an answer approximate without a load.
        method, level = ("blend", "prefix") if self.shared else ("none", "")

        return {
            "method": lookup_result.method if ordered_tokens else method,
            "level": lookup_result.level if ordered_tokens else level,
            "donor": donors[0] if donors else None,
            "donors": list(donors),
            "score": lookup_result.score if ordered_tokens else None,
            "tokens_reused": self.shared + self.spared,
            "tokens_recomputed": load_result.computed,
            "bytes_loaded": load_result.nbytes,
            "load_s": load_result.seconds,
            "approximate": self.approximate,
            "rows_kept": sum(meta.num_tokens for meta in self.kept),
            "kept": self._kept(),
            "reason": short(self.reason),
            "prompt_key": lookup_result.key,
        }

    def _kept(self) -> dict[str, Any]:
        """The stored rows: first, stop and id of each run, their donors and generation."""
        if not self.kept:
            return {}
        first = self.kept[0]
        runs = [(meta.position, meta.position + meta.num_tokens, meta.id) for meta in self.kept]
        return {"runs": runs, "donors": list(first.metadata[DONORS]), "generation": first.generation}
