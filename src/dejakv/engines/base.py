"""The seam of an engine: prepare a request, run it by a plan, hand back the state that was computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.config import SemanticCacheConfig
from dejakv.decide.costs import Costs
from dejakv.decide.plan import FULL as FULL
from dejakv.decide.plan import PIECEWISE as PIECEWISE
from dejakv.decide.plan import Accept as Accept
from dejakv.decide.plan import Plan as Plan
from dejakv.errors import ModelError
from dejakv.request import Media, Request
from dejakv.request import Prepared as Prepared
from dejakv.store.base import Chunk, ChunkMeta, Rows, Tensor
from dejakv.store.store import Store

if TYPE_CHECKING:
    from dejakv.blend.settings import BlendConfig
    from dejakv.blend.top_layer import TopLayerConfig
    from dejakv.encoder_cache import VisualKVCache

OnToken = Callable[[int, str], None]

NO_STATE = Tensor(np.zeros((2, 1, 1, 1, 1), np.uint8), "U8")
"""Stands in a chunk where a prompt is described and its state is kept elsewhere, or by nobody."""

UNREADABLE = "the donor's state could not be read"
"""Why a prompt is not run from donors of which none can be read."""


class Donor(Protocol):
    """A state by its description, from which the rows that are needed can be read: a chunk, or one in a store."""

    @property
    def meta(self) -> ChunkMeta: ...

    def read(self, rows: Rows) -> Sequence[Chunk] | None:
        """Chunks that hold at least these rows, each those from its `first` on; None if they cannot be read."""
        ...

    def whole(self) -> Chunk | None:
        """All rows in one chunk."""
        ...


@dataclass(frozen=True)
class StoredDonor:
    """See `Donor`. It is read when its rows are asked for."""

    store: Store
    meta: ChunkMeta

    def read(self, rows: Rows) -> Sequence[Chunk] | None:
        return self.store.get_parts(self.meta.id, rows)

    def whole(self) -> Chunk | None:
        return self.store.get(self.meta.id)


@dataclass(frozen=True)
class ComputedRows:
    """Rows of a blended prompt that were computed in every layer and stand in none of its donors.

    runs        first and stop of each run of them in the prompt; no run holds a part of a picture
    donors      ids of the chunks whose state they attended to
    generation  1 + the largest generation of these
    capture     returns K and V of the prompt's rows first..stop as one stacked tensor (see `Chunk`), None if the engine cannot;
                costs a copy: call it after the answer
    """

    runs: tuple[tuple[int, int], ...]
    donors: tuple[str, ...]
    generation: int
    capture: Callable[[int, int], Tensor | None] = field(repr=False)


@dataclass(frozen=True)
class Completion:
    """What came out and what it took.

    prompt_tokens    of the prompt that ran: a donor's, where its own was run in the request's place
    computed_tokens  prompt tokens (rows) that went through the decoder; for blend the mean over layers, rounded up
    encoder_runs     pictures that went through the tower
    capture          returns the prompt's whole KV as one stacked tensor (see `Chunk`), None if the engine cannot;
                     costs a copy: call it after the answer
    approximate      the engine decoded from less than the prompt's whole state (pruning); what `capture` returns is whole
    rows             what later blends may take from this one, None if nothing was blended
    arithmetic       the model's dtype: `fp32`, `bf16`, `fp16`; empty if the engine does not tell
    bitwise          the prompt's scores are those of full computation bit for bit
    shared           the caller is handed the state as well (in `details`): capture before it can change it
    exactly          why the engine ran the prompt exactly although the plan was to blend; empty: it ran the plan
    continued        log probabilities `[tokens, vocabulary]` of some answer's tokens from the state that this run left
                     (teacher forcing), None if the engine cannot; for measurements
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
    """Why a plan was not run, in one sentence. Nothing of an answer was told, and the next plan runs.

    details  of a blend its `BlendReport` as `details["blend"]`
    """

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def settings_of(plan: Plan) -> "BlendConfig | TopLayerConfig":
    """How a piecewise plan is to be run."""
    from dejakv.blend.settings import BlendConfig
    from dejakv.blend.top_layer import TopLayerConfig

    config = plan.config or SemanticCacheConfig()
    if plan.method == "top_layer":
        return TopLayerConfig(config.top_layer_tail, max_computed=plan.most)
    return BlendConfig(config.blend_map, config.blend.selector, config.blend.share, max_computed=plan.most)


class Engine:
    """One model that answers prompts, from nothing or from stored state. Subclass it; what a method does not do, its default refuses.

    ==================  ==========================================================================================
    `epoch`             read before each lookup: fingerprint of weights, tokenizer, processor, dtype and KV layout.
                        Empty: state cannot be told apart (`unidentified` says why), and nothing is looked up or stored
    `prepare`           a request becomes token ids
    `costs`             what rows, bytes and blends take, for the choice of a plan
    `run`               one plan after another, best first, until one returns a `Completion`
    `Completion.capture`  after the answer, for the store
    `forget`            a partition is purged
    `weights_changed`   the owner changed the model
    ==================  ==========================================================================================

    name               for messages and reports
    piece              see `Prepared`
    context            tokens that prompt and answer may have together
    most_donors        of how many prompts a blend takes state at most; None: of as many as it is given
    tells_first_token  whether plans' `accept` is asked
    holds_state        it keeps computed state itself: a cache over it describes prompts, and no state is given to it
    encoder_cache      the registry of its picture tower's outputs; None where there is none
    """

    name: str = ""
    epoch: str = ""
    unidentified: str = ""
    piece: int = 1
    context: int = 1 << 20
    most_donors: int | None = None
    tells_first_token: bool = False
    holds_state: bool = False
    encoder_cache: "VisualKVCache | None" = None

    def prepare(self, request: Request) -> Prepared:
        """Tokenizes a request, media included. Raises: InputError for a request that cannot be served."""
        raise NotImplementedError(f"the engine {self.name} has no prepare: return a Prepared")

    def run(
        self, prepared: Prepared, plan: Plan = FULL, store: Store | None = None, *, on_token: OnToken | None = None
    ) -> Completion | Refusal:
        """Answers a prompt by one plan, with its request's sampling.

        store     holds the state of the plan's donors
        on_token  told of each token as it comes

        State that is missing, damaged or of another model, and a first token that `plan.accept` declines, are a `Refusal`. Full
        computation (`FULL`) is never refused. Once a token was told, the run ends with a completion or an error.

        Raises: InputError; ModelChangedError where `prepared.epoch` is not the model's, before anything is computed.
        """
        raise NotImplementedError(f"the engine {self.name} has no run: return a Completion or a Refusal")

    def full(self, prepared: Prepared, *, on_token: OnToken | None = None) -> Completion:
        """Full computation. Raises: as `run`."""
        ran = self.run(prepared, on_token=on_token)
        if not isinstance(ran, Completion):
            raise ModelError(f"the engine {self.name} refused full computation ({ran.reason}): return a Completion")
        return ran

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: Any = None,
        *,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | Refusal:
        """Answers from similar prompts' state, token by token.

        config  a `BlendConfig`, or a `TopLayerConfig` for the top layer's state alone (Sim-LLM); None: a blend by its defaults
        accept  may decline by the first token

        `details["blend"]` is a `BlendReport`. What cannot be blended is refused, with the reason.
        """
        return Refusal(f"the engine {self.name} cannot blend")

    def no_top_layer(self) -> str:
        """Why it takes no top-layer state of similar prompts; empty if it does."""
        return f"the engine {self.name} has no top_layer: use the transformers engine"

    def costs(self, *, timed: bool = True) -> Costs | None:
        """The constants as they are now, measured when first asked for, then following requests; None: not known, and the plan that
        reuses most runs. `timed=False` runs nothing: until they are measured, they are counted from the model's shape."""
        return None

    def apart(self, kept: int) -> "Engine":
        """The engine for one run as if it did not hold the prompt's own state. `kept`: tokens of the exact prefix that it may use."""
        return self

    def state_bytes(self) -> int:
        """Bytes of state that it keeps itself."""
        return 0

    def weights_changed(self) -> object:
        """Fingerprints the model anew, where a change may be seen late otherwise."""
        return None

    def forget(self, partition: str | None) -> None:
        """Forgets what it remembers of one partition's requests for speed, or of all."""

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32, without running the decoder."""
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
