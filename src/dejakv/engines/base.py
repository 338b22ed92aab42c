"""Interface of engines: prepare a request, run a plan, return the computed state."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.config import ReuseMethod, SemanticCacheConfig
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.plan import FULL as FULL
from dejakv.decide.plan import PIECEWISE as PIECEWISE
from dejakv.decide.plan import Accept as Accept
from dejakv.decide.plan import Plan as Plan
from dejakv.errors import ModelError
from dejakv.request import Media, Request
from dejakv.request import Prepared as Prepared
from dejakv.store.base import ChunkMeta, Rows, StoredState, Tensor
from dejakv.store.store import Store

if TYPE_CHECKING:
    from dejakv.blend.settings import BlendConfig
    from dejakv.blend.top_layer import TopLayerConfig
    from dejakv.encoder_cache import VisualKVCache

# Token id, and the text that it adds: empty until a character is complete.
OnToken = Callable[[int, str], None]

NO_STATE = Tensor(np.zeros((2, 1, 1, 1, 1), np.uint8), "U8")
"""Stands in a chunk where a prompt is described and its state is kept elsewhere, or by nobody."""

UNREADABLE = "the donor's state could not be read"
"""Why a prompt is not run from donors of which none can be read."""

LATE = "the deadline of reading the donor's state from the bucket has come"
"""Why a prompt is not run from state in a bucket: by then it would have been computed."""


def unread(until: float | None, otherwise: str = UNREADABLE) -> str:
    """Why awaited state was not read: its deadline `until` has passed, or `otherwise`."""
    return otherwise if until is None or time.monotonic() < until else LATE


class Donor(Protocol):
    """A chunk, or one in a store: a description with rows to read on demand."""

    @property
    def meta(self) -> ChunkMeta: ...

    def read(self, rows: Rows) -> Sequence[StoredState] | None:
        """Chunks with at least these rows, each from its `first` on; None if unreadable."""
        ...

    def whole(self) -> StoredState | None:
        """All rows in one chunk; None if unreadable."""
        ...


@dataclass(frozen=True)
class StoredDonor:
    """A `Donor` in a store, read on demand. `until`: see `Store.get_parts`."""

    store: Store
    meta: ChunkMeta
    until: float | None = None

    def read(self, rows: Rows) -> Sequence[StoredState] | None:
        return self.store.get_parts(self.meta.id, rows, self.until)

    def whole(self) -> StoredState | None:
        return self.store.get(self.meta.id, self.until)


@dataclass(frozen=True)
class ComputedRows:
    """Rows of a blended prompt computed in every layer, without those of its donors.

    runs        first and stop of each run in the prompt, without parts of pictures
    donors      ids of the chunks that the rows attended to
    generation  1 + the largest generation of these
    capture     returns K and V of the prompt's rows first..stop as one stacked tensor (see `StoredState`), None if unsupported;
                costs a copy: call it after the answer
    """

    runs: tuple[tuple[int, int], ...]
    donors: tuple[str, ...]
    generation: int
    capture: Callable[[int, int], Tensor | None] = field(repr=False)


@dataclass(frozen=True)
class Completion:
    """Answer, state and counts of a run.

    prompt_tokens    of the prompt that ran: a donor's, if it ran in the request's place
    computed_tokens  prompt tokens (rows) through the decoder; for blend the mean over layers, rounded up
    encoder_runs     pictures through the vision tower
    ttft_s, latency_s  seconds from the run's begin to the first and to the last token
    capture          returns the prompt's whole KV as one stacked tensor (see `StoredState`), None if unsupported;
                     costs a copy: call it after the answer
    approximate      decoded from less than the prompt's whole state (pruning); `capture` still returns the whole
    rows             rows for later blends, None without a blend
    arithmetic       the model's dtype: `fp32`, `bf16`, `fp16`; empty if unknown
    bitwise          the prompt's scores equal full computation bit for bit
    shared           the caller gets the state as well (in `details`): capture before it changes
    exactly          why a blend ran exactly instead; empty: it ran the plan
    continued        log probabilities `[tokens, vocabulary]` of an answer's tokens from this run's state (teacher forcing),
                     None if unsupported; for measurements
    details          the engine's own; of a blend its `BlendReport` as `details["blend"]`
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    encoder_runs: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    inject_s: float = 0.0
    bytes_loaded: int = 0
    capture: Callable[[], Tensor | None] = field(default=lambda: None, repr=False)
    approximate: bool = False
    rows: ComputedRows | None = None
    arithmetic: str = ""
    bitwise: bool = False
    shared: bool = False
    exactly: str = ""
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = field(default=lambda _: None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Refusal:
    """Reason of a refused plan, in one sentence. No token was sent; the next plan runs.

    details  of a blend its `BlendReport` as `details["blend"]`
    """

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def settings_of(plan: Plan) -> "BlendConfig | TopLayerConfig":
    """Settings of a piecewise plan."""
    from dejakv.blend.settings import BlendConfig
    from dejakv.blend.top_layer import TopLayerConfig

    config = plan.config or SemanticCacheConfig()
    if plan.method == "top_layer":
        return TopLayerConfig(config.top_layer_tail, max_computed=plan.most)
    return BlendConfig(config.blend_map, config.blend.selector, config.blend.share, max_computed=plan.most)


class Engine:
    """Base class of engines: one model that answers prompts, in full or from stored state. Defaults refuse unsupported work.

    ==================  ==========================================================================================
    `epoch`             read before each lookup: fingerprint of weights, tokenizer, processor, dtype and KV layout.
                        Empty: the model is unidentified (`unidentified` says why); no lookup, no storage
    `no_reuse`          why the engine reuses no state of this model; empty if it does
    `prepare`           tokenizes a request
    `costs`             costs of rows, bytes and blends, to choose a plan
    `run`               called with plans, best first, until one returns a `Completion`
    `Completion.capture`  called after the answer, for the store
    `forget`            called on a purge of a partition
    `weights_changed`   called after the owner changed the model
    ==================  ==========================================================================================

    name               for messages and reports
    piece              see `Prepared`
    context            maximum tokens of prompt and answer together
    most_donors        maximum donors of a blend; None: unlimited
    tells_first_token  whether it asks plans' `accept`
    holds_state        it keeps computed state itself: a cache over it describes prompts, without their state
    encoder_cache      registry of its vision tower's outputs; None without one
    generation         digest of all settings that decide a greedy answer and that a request does not name
    """

    name: str = ""
    generation: str = ""
    epoch: str = ""
    unidentified: str = ""
    no_reuse: str = ""
    piece: int = 1
    context: int = 1 << 20
    most_donors: int | None = None
    tells_first_token: bool = False
    holds_state: bool = False
    encoder_cache: "VisualKVCache | None" = None

    def prepare(self, request: Request) -> Prepared:
        """Tokenize a request, media included. Raises: InputError for an invalid request."""
        raise NotImplementedError(f"the engine {self.name} has no prepare: return a Prepared")

    def run(
        self, prepared: Prepared, plan: Plan = FULL, store: Store | None = None, *, on_token: OnToken | None = None
    ) -> Completion | Refusal:
        """Answer a prompt by one plan, with its request's sampling.

        store     holds the state of the plan's donors
        on_token  called with each token

        Returns a `Refusal` for missing, damaged or foreign state, and for a first token declined by `plan.accept`. Full computation
        (`FULL`) is never refused. After the first sent token, the run ends with a completion or an error.

        Raises: InputError; ModelChangedError, before any computation, if `prepared.epoch` is not the model's.
        """
        raise NotImplementedError(f"the engine {self.name} has no run: return a Completion or a Refusal")

    def full(self, prepared: Prepared, *, on_token: OnToken | None = None) -> Completion:
        """Compute in full. Raises: as `run`."""
        outcome = self.run(prepared, on_token=on_token)
        # Full computation is never refused, by contract: name the engine that breaks it.
        if not isinstance(outcome, Completion):
            raise ModelError(f"the engine {self.name} refused full computation ({outcome.reason}): return a Completion")
        return outcome

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: Any = None,
        *,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | Refusal:
        """Answer from similar prompts' state, token by token.

        config  a `BlendConfig`, or a `TopLayerConfig` for the top layer's state alone (Sim-LLM); None: a blend by its defaults
        accept  may decline by the first token

        `details["blend"]` is a `BlendReport`. Returns a `Refusal` with the reason if it cannot blend.
        """
        return Refusal(f"the engine {self.name} cannot blend")

    def no_top_layer(self) -> str:
        """Why top-layer state of similar prompts is unsupported; empty if it is supported."""
        return f"the engine {self.name} has no top_layer: use the transformers engine"

    def costs(self, *, timed: bool = True) -> ReuseCosts | None:
        """Current constants, measured at the first call and corrected by requests; None: unknown, and the plan with most reuse runs.

        timed  False runs nothing: until measured, costs are counted from the model's shape
        """
        return None

    def get_ready(self, method: ReuseMethod) -> None:
        """Do beforehand, once, what the first request with a method would have to wait for."""

    def apart(self, prefix_tokens: int) -> "Engine":
        """Engine for one run without the prompt's own state. `prefix_tokens`: tokens of the exact prefix to allow."""
        return self

    def state_bytes(self) -> int:
        """Bytes of state kept by the engine itself."""
        return 0

    def weights_changed(self) -> object:
        """Fingerprint the model again, if a change could otherwise go unseen for a while."""
        return None

    def forget(self, partition: str | None) -> None:
        """Forget remembered requests of a partition, or of all."""

    def close(self) -> None:
        """End what the engine runs."""

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32, without running the decoder. This and the next two raise NotImplementedError by
        default."""
        raise NotImplementedError(
            f"the engine {self.name} has no embeddings: choose another index_encoder than 'model'"
        )

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean-pooled, normalized input embedding of a text, `[hidden]` float32."""
        raise NotImplementedError(
            f"the engine {self.name} has no embeddings: choose another index_encoder than 'model'"
        )

    def embed_image(self, media: Media) -> NDArray[np.float32]:
        """Mean-pooled, normalized output of the served model's own vision tower, `[dim]` float32."""
        raise NotImplementedError(f"the engine {self.name} has no vision tower: choose an image-text model")
