"""The seam of an engine: prepare a request, run it from a given state, hand back the state it computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dejakv.costs import Costs
from dejakv.errors import ModelError
from dejakv.identity import Span
from dejakv.request import Media, Request, Sampling
from dejakv.store.base import Chunk, Tensor
from dejakv.store.donors import Donor

if TYPE_CHECKING:
    from dejakv.config import SemanticCacheConfig
    from dejakv.encoder_cache import VisualKVCache
    from dejakv.reuse.blend import BlendConfig, BlendReport
    from dejakv.reuse.top_layer import TopLayerConfig

OnToken = Callable[[int, str], None]

Accept = Callable[[NDArray[np.float32]], str]
"""Sees the log probabilities `[vocabulary]` of an answer's first token before anybody gets it. Empty: go on; else why not."""

NO_STATE = Tensor(np.zeros((2, 1, 1, 1, 1), np.uint8), "U8")
"""Stands in a chunk where a prompt is described and its state is kept elsewhere, or by nobody."""

UNREADABLE = "the donor's state could not be read"
"""Why a prompt is not run from donors of which none can be read."""


@dataclass(frozen=True)
class Prepared:
    """A tokenized request. `inputs` is the engine's own (lazily processed pixels, position ids, ...).

    epoch  what the engine's epoch was when state was looked up for it; empty if no state is to be used. An engine that
           finds another epoch before it computes raises ModelChangedError. `prepare` sets it where prompts of one length
           have an epoch of their own (`_own_epoch` of the transformers engine).
    piece  tokens of the pieces in which the engine prefills prompts, so that exact state is reused piece by piece; 1: any number
    """

    request: Request
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    inputs: Any = field(default=None, repr=False)
    epoch: str = ""
    piece: int = 1


def pieces(tokens: int, piece: int, spans: Sequence[Span] = ()) -> list[int]:
    """Where a prompt of `tokens` tokens is divided: every `piece` tokens, or behind the picture that stands there; nowhere for 1.
    What is behind the last of these places has a token at least. Longer prompts with this beginning are divided there as well."""
    if piece == 1:
        return []
    ends = {
        next((span.start + span.length for span in spans if span.start < place < span.start + span.length), place)
        for place in range(piece, tokens, piece)
    }
    return sorted(end for end in ends if end < tokens)


def reusable(held: int, tokens: int, piece: int, spans: Sequence[Span] = ()) -> int:
    """How many tokens of a prompt need not be computed if exact state of the first `held` is there: whole pieces, at most all
    tokens but the last."""
    if piece == 1:
        return max(0, min(held, tokens - 1))
    return max((place for place in pieces(tokens, piece, spans) if place <= held), default=0)


@dataclass(frozen=True)
class Start:
    """State to begin from: the KV of the first `tokens` tokens, exact for them. `chunk.tensor` may hold more tokens.

    What an engine does with it: compute tokens `tokens..n-1` only. `tokens` is at most `n - 1`; of a prompt that is prefilled in
    pieces, fewer are taken.
    """

    chunk: Chunk
    tokens: int


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

    computed_tokens  prompt tokens (rows) that went through the decoder; for blend the mean over layers, rounded up
    encoder_runs     pictures that went through the tower
    capture          returns the prompt's whole KV as one stacked tensor (see `Chunk`), None if the engine cannot;
                     costs a copy: call it after the answer
    label            what must stand before `text` wherever it is shown (`records.UNSOUND_LABEL`); empty for an answer of the model's
    approximate      the engine decoded from less than the prompt's whole state (pruning); what `capture` returns is whole
    rows             what later blends may take from this one, None if nothing was blended
    arithmetic       the model's dtype: `fp32`, `bf16`, `fp16`; empty if the engine does not tell
    bitwise          the prompt's scores are those of full computation bit for bit
    shared           the caller is handed the state as well (in `details`): capture before it can change it
    continued        log probabilities `[tokens, vocabulary]` of some answer's tokens from the state that this run left
                     (teacher forcing), None if the engine cannot; for measurements
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
    label: str = ""
    approximate: bool = False
    rows: ComputedRows | None = None
    arithmetic: str = ""
    bitwise: bool = False
    shared: bool = False
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = field(default=lambda _: None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Engine(Protocol):
    """`epoch` fingerprints weights, tokenizer, processor, dtype and KV layout (see identity). Where it is empty, state cannot
    be told apart: nothing is looked up or stored."""

    name: str

    @property
    def epoch(self) -> str: ...

    def prepare(self, request: Request) -> Prepared: ...

    def run(
        self,
        prepared: Prepared,
        *,
        start: Start | None = None,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
    ) -> Completion: ...

    def embed_tokens(self, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32, without running the decoder."""
        ...

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean-pooled, normalized input embedding of a text, `[hidden]` float32."""
        ...

    def embed_image(self, media: Media) -> NDArray[np.float32]:
        """Mean-pooled, normalized output of the served model's own vision tower, `[dim]` float32."""
        ...


@runtime_checkable
class KnowsCosts(Protocol):
    """An engine that knows what its work takes here. In others the plan that reuses most runs."""

    def costs(self, *, timed: bool = True) -> Costs:
        """The constants as they are now: measured when first asked for, then following what requests took. `timed=False` runs
        nothing: until they are measured, they are counted from the model's shape."""
        ...

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Tells how long it took to bring state of so many bytes from the store into the engine."""
        ...


def costs_of(engine: object, fixed: tuple[float, ...], *, timed: bool = True) -> Costs | None:
    """What plans cost in an engine; `fixed`: the setting `costs`. None for one that does not know."""
    return engine.costs(timed=timed and not fixed).fixed(fixed) if isinstance(engine, KnowsCosts) else None


@runtime_checkable
class FollowsWeights(Protocol):
    """An engine that tells which weights its model has, and can be told to look again."""

    @property
    def unidentified(self) -> str:
        """Why the epoch is empty; empty if it is not."""
        ...

    def weights_changed(self) -> object:
        """Fingerprints the model anew, where a change may be seen late otherwise."""
        ...


@runtime_checkable
class Blends(Protocol):
    """An engine that answers a prompt from the state of similar ones, token by token.

    most_donors        of how many it takes state at most; None: of as many as it is given
    tells_first_token  whether `blend` asks `accept`
    """

    @property
    def most_donors(self) -> int | None: ...

    @property
    def tells_first_token(self) -> bool: ...

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: "BlendConfig",
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> "Completion | BlendReport":
        """The completion with its report as `details["blend"]`, also where the engine ran the prompt exactly by itself; the
        report alone if nothing was run or `accept` declined, with the reason.

        Raises: InputError, and ModelError for state of another model.
        """
        ...


@runtime_checkable
class TakesTopLayer(Protocol):
    """An engine that answers a prompt from the top layer's state of similar ones (Sim-LLM): tokens that take it skip the layers that
    attend to the top layer."""

    def without_top_layer(self, *, unsound: bool) -> str:
        """Why it does not with the model that it has, in words; empty if it does.

        unsound  allows models whose layers attend to their own state, for study: such answers are labelled
        """
        ...

    def top_layer(
        self,
        prepared: Prepared,
        donors: Sequence[Chunk],
        config: "TopLayerConfig",
        *,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> "Completion | BlendReport":
        """As `Blends.blend`. Nothing of the state that it leaves is kept."""
        ...


def no_top_layer(engine: object, *, unsound: bool = False) -> str:
    """Why an engine answers nothing from the top layer of similar prompts, in words; empty if it does."""
    if not isinstance(engine, TakesTopLayer):
        return (
            f"the engine {getattr(engine, 'name', type(engine).__name__)} has no top_layer: use the transformers engine"
        )
    return engine.without_top_layer(unsound=unsound)


def check_top_layer(engine: object, config: "SemanticCacheConfig") -> None:
    """Raises: ModelError where the settings ask for `top_layer` and engine or model has none."""
    if config.reuse != "top_layer":
        return
    reason = no_top_layer(engine, unsound=config.unsound)
    if reason:
        raise ModelError(
            f"reuse=top_layer: {reason}. Use a layer-condensed model (docs-lckv is bundled), or reuse=blend for this one; "
            "unsound=True (--unsound of `dejakv run`) runs an ordinary model for study, and labels what it says"
        )


@runtime_checkable
class HoldsState(Protocol):
    """An engine that keeps computed state itself: a cache over it describes prompts, and no state is given to it."""

    def state_bytes(self) -> int:
        """Bytes of the state that it keeps."""
        ...


@runtime_checkable
class KeepsEncoderOutputs(Protocol):
    """An engine that can keep what its picture tower made, by content."""

    @property
    def encoder_cache(self) -> "VisualKVCache | None":
        """The registry; None where the model has no tower, or nothing is kept."""
        ...


def encoder_outputs_of(engine: object) -> "VisualKVCache | None":
    """The registry of an engine's encoder outputs; None if it has none."""
    return engine.encoder_cache if isinstance(engine, KeepsEncoderOutputs) else None


@runtime_checkable
class LimitsContext(Protocol):
    """An engine whose model takes a limited number of tokens."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...


@runtime_checkable
class RunsApart(Protocol):
    """An engine that holds computed state itself, and can run a prompt as if it did not hold that very prompt's."""

    def apart(self, kept: int) -> Engine:
        """The engine for one run. `kept`: tokens of the exact prefix that it may use."""
        ...
