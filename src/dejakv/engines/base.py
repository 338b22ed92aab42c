"""Interface of engines: prepare a request, run a plan, return the computed state."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv import plugins
from dejakv.config import SemanticCacheConfig
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.methods import BlendPlan as BlendPlan
from dejakv.decide.plan import FULL as FULL
from dejakv.decide.plan import Accept as Accept
from dejakv.decide.plan import PiecewisePlan
from dejakv.decide.plan import Plan as Plan
from dejakv.errors import FormerAttribute, ModelError, move_former_attribute
from dejakv.request import Media, Request
from dejakv.request import Prepared as Prepared
from dejakv.store.base import RawTensor, Rows, StateInfo, StoredState
from dejakv.store.store import Store

if TYPE_CHECKING:
    from dejakv.blend.settings import BlendConfig
    from dejakv.encoder_cache import VisualKVCache

OnToken = Callable[[int, str], None]
"""Called with a token id and the text that it adds; empty until a character is complete."""

NO_STATE = RawTensor(np.zeros((2, 1, 1, 1, 1), np.uint8), "U8")
"""The tensor of an entry that describes a prompt whose state is elsewhere, or nowhere."""

UNREADABLE = "the donor's state could not be read"
"""Reason of a refusal: none of the donors could be read."""

LATE = "the deadline of reading the donor's state from the bucket has come"
"""Reason of a refusal: reading from a bucket took so long that computing is faster."""

NO_SNAPSHOT = (
    "the model keeps recurrent state, and no snapshot of it stands within the stored beginning of "
    "the prompt"
)
"""Why a stored prefix of a model with fixed state is not continued."""


def unread_reason(until: float | None, otherwise: str = UNREADABLE) -> str:
    """Return the reason of a refusal for a donor that was not read.

    Parameters
    ----------
    until : float or None
        Deadline of the read, on `time.monotonic`; None for a read without one.
    otherwise : str
        Reason where the deadline has not passed.
    """
    return otherwise if until is None or time.monotonic() < until else LATE


class Donor(Protocol):
    """An earlier prompt with rows of state to read on demand."""

    @property
    def meta(self) -> StateInfo:
        """Description of the stored state."""
        ...

    def read(self, rows: Rows) -> Sequence[StoredState] | None:
        """Read stored states that together hold at least these rows.

        Returns
        -------
        Sequence[StoredState] or None
            States in ascending order, each from its `first` row on; None if one is unreadable.
        """
        ...

    def whole(self) -> StoredState | None:
        """Read all rows as one stored state; None if it is unreadable."""
        ...


@dataclass(frozen=True)
class StoredDonor:
    """A donor in a store, read on demand.

    Attributes
    ----------
    store : Store
        Store that holds the donor's state.
    meta : StateInfo
        Description of the donor.
    until : float or None
        Deadline of a read; see `Store.get_parts`.
    """

    store: Store
    meta: StateInfo
    until: float | None = None

    def read(self, rows: Rows) -> Sequence[StoredState] | None:
        """Read the rows from the store, until the deadline."""
        return self.store.get_parts(self.meta.id, rows, self.until)

    def whole(self) -> StoredState | None:
        """Read all rows from the store, until the deadline."""
        return self.store.get(self.meta.id, self.until)


@dataclass(frozen=True)
class ComputedRows:
    """Rows of a blended prompt that were computed in every layer, without those of its donors.

    Attributes
    ----------
    runs : tuple[tuple[int, int], ...]
        First and stop of each run of rows in the prompt. No run holds tokens of a picture.
    donors : tuple[str, ...]
        Ids of the entries that the rows attended to.
    generation : int
        One more than the largest generation of the donors.
    capture : Callable[[int, int], RawTensor | None]
        Copies K and V of the prompt's rows `first` to `stop - 1` into one stacked tensor (see
        `StoredState`); None if that is unsupported. Call it after the answer, since the copy takes
        time.
    """

    runs: tuple[tuple[int, int], ...]
    donors: tuple[str, ...]
    generation: int
    capture: Callable[[int, int], RawTensor | None] = field(repr=False)


@dataclass(frozen=True)
class Completion:
    """Answer, state and counts of one run.

    Attributes
    ----------
    text : str
        The answer.
    token_ids : tuple[int, ...]
        Tokens of the answer.
    prompt_tokens : int
        Tokens of the prompt that ran: a donor's, if it ran in the request's place.
    computed_tokens : int
        Prompt tokens that went through the decoder; of a blend the mean over layers, rounded up.
    encoder_runs : int
        Pictures that went through the vision tower.
    ttft_s, latency_s : float
        Seconds from the start of the run to its first and to its last token.
    inject_s : float
        Seconds until the stored state stood in the model's cache.
    bytes_loaded : int
        Bytes of stored state that were put into the model.
    capture : Callable[[], RawTensor | None]
        Copies the prompt's whole KV into one stacked tensor (see `StoredState`); None if that is
        unsupported. Call it after the answer, since the copy takes time.
    capture_with_answer : Callable[[], RawTensor | None] or None
        As `capture`, for the prompt and its answer without the answer's last token, whose state no
        run computes. None if the engine gives none (see `Engine.keeps_answers`), and where the
        state of decoded tokens differs from that of the same tokens in a prompt by more than
        float32 rounding.
    approximate : bool
        Whether the answer was decoded from less than the prompt's whole state (pruning). `capture`
        still returns the whole.
    rows : ComputedRows or None
        Rows for later blends; None without a blend.
    arithmetic : str
        Dtype of the model: `fp32`, `bf16`, `fp16`; empty if unknown.
    bitwise : bool
        Whether the prompt's scores equal full computation bit for bit.
    shared : bool
        Whether the caller gets the state as well, in `details`: capture it before it changes.
    exactly : str
        Why another plan ran, an exact one in place of a blend or full computation in place of a
        prefix; empty if the plan ran.
    snapshots : Mapping[int, Callable[[], RawTensor | None]]
        Of a model with fixed state: by numbers of tokens of the prompt with its answer, what copies
        the fixed state after them, as `capture`.
    continued_in_pieces : Callable[[Sequence[int]], Iterable[NDArray]]
        Log probabilities `[tokens, vocabulary]` of an answer's tokens, continued from this run's
        state (teacher forcing), in consecutive pieces of few tokens; none if unsupported.
    details : Mapping[str, Any]
        Values of the engine's own. `details["blend"]` is a blend's `BlendReport`.
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
    capture: Callable[[], RawTensor | None] = field(default=lambda: None, repr=False)
    capture_with_answer: Callable[[], RawTensor | None] | None = field(default=None, repr=False)
    approximate: bool = False
    rows: ComputedRows | None = None
    arithmetic: str = ""
    bitwise: bool = False
    shared: bool = False
    exactly: str = ""
    snapshots: Mapping[int, Callable[[], RawTensor | None]] = field(
        default_factory=dict[int, Callable[[], "RawTensor | None"]], repr=False
    )
    continued_in_pieces: Callable[[Sequence[int]], Iterable[NDArray[np.float32]]] = field(
        default=lambda _: (), repr=False
    )
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def continued(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        """Return the log probabilities of an answer's tokens as one array.

        Parameters
        ----------
        tokens : Sequence[int]
            Tokens of the answer.

        Returns
        -------
        NDArray, shape [tokens, vocabulary], or None
            Float32; None if the state cannot be continued.
        """
        pieces = list(self.continued_in_pieces(tokens))
        return np.concatenate(pieces) if pieces else None


@dataclass(frozen=True)
class Refusal:
    """Reason of a refused plan. No token was sent, and the next plan runs.

    Attributes
    ----------
    reason : str
        One sentence.
    details : Mapping[str, Any]
        `details["blend"]` is a refused blend's `BlendReport`.
    """

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def settings_of(plan: BlendPlan) -> "BlendConfig":
    """Return the settings of a blend's plan."""
    from dejakv.blend.settings import BlendConfig

    config = plan.config or SemanticCacheConfig()
    return BlendConfig(
        config.blend_map,
        config.blend.selector,
        config.blend.share,
        foreign_context=config.foreign_context,
        max_computed=plan.max_row_share,
    )


def blend_donors(
    engine: "Engine",
    prepared: Prepared,
    plan: PiecewisePlan,
    store: Store,
    config: Any,
    *,
    on_token: OnToken | None = None,
) -> Completion | Refusal:
    """Run a piecewise plan through `Engine.blend`, with the plan's donors, deadline and judge.

    Parameters
    ----------
    engine : Engine
        Engine that runs the plan.
    prepared : Prepared
        The tokenized request.
    plan : PiecewisePlan
        Plan whose donors are read.
    store : Store
        Store with the donors' state.
    config : Any
        Settings for `Engine.blend`.
    on_token : OnToken or None
        Called with each token.

    Returns
    -------
    Completion or Refusal
        What `Engine.blend` returns. Where state in a bucket missed its deadline, that is the
        reason.
    """
    until = plan.deadline()
    donors = [StoredDonor(store, meta, until) for meta in plan.donors]
    outcome = engine.blend(prepared, donors, config, on_token=on_token, accept=plan.accept)
    if plan.read_seconds and isinstance(outcome, Refusal) and outcome.reason == UNREADABLE:
        return replace(outcome, reason=unread_reason(until))
    return outcome


def unknown_plan(engine: "Engine", plan: Plan) -> Refusal:
    """Return the refusal of a plan that an engine does not run by itself."""
    return Refusal(
        f"the engine {engine.name} does not run plans of {plan.method}: give the method a run"
    )


class Engine:
    """Base class of engines: one model that answers prompts, in full or from stored state.

    The defaults refuse unsupported work. A request meets an engine in this order:

    1. `epoch` is read before the lookup. Where it is empty the model is unidentified
    (`unidentified` says why), and nothing is looked up or stored.
    2. `prepare` tokenizes the request.
    3. `costs` gives the constants by which a plan is chosen.
    4. `run` is called with plans, best first, until it returns a `Completion`.
    5. `Completion.capture` is called after the answer, for the store.

    `forget` is called on a purge of a partition, `weights_changed` after the owner changed the
    model.

    Attributes
    ----------
    name : str
        Name for messages and reports.
    generation : str
        Digest of all settings that decide a greedy answer and that a request does not name.
    epoch : str
        Fingerprint of weights, tokenizer, processor, dtype and KV layout; empty if unidentified.
    unidentified : str
        Why the epoch is empty.
    no_reuse : str
        Why the engine reuses no state of this model; empty if it does.
    prefill_unit : int
        Tokens of a prefill unit; see `Prepared`.
    context : int
        Maximum tokens of prompt and answer together.
    max_donors : int or None
        Maximum donors of a blend; None for any number.
    tells_first_token : bool
        Whether the engine asks a plan's `accept` about the first token.
    computes_token_ids : bool
        Whether `run` computes `Prepared.token_ids` whatever text the request has, so that the
        tokens of an answer can be computed behind their prompt.
    keeps_answers : bool
        Whether a cache stores the state of answers (`Completion.capture_with_answer`), which sets
        it.
    holds_state : bool
        Whether the engine keeps computed state itself. A cache over it then describes prompts
        without their state.
    encoder_cache : VisualKVCache or None
        Registry of the vision tower's outputs.
    """

    name: str = ""
    generation: str = ""
    epoch: str = ""
    unidentified: str = ""
    no_reuse: str = ""
    prefill_unit: int = 1
    context: int = 1 << 20
    max_donors: int | None = None
    tells_first_token: bool = False
    computes_token_ids: bool = False
    keeps_answers: bool = False
    holds_state: bool = False
    encoder_cache: "VisualKVCache | None" = None

    piece = FormerAttribute("prefill_unit")

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Take a subclass's `piece`, the former name, as its `prefill_unit`."""
        super().__init_subclass__(**keywords)
        move_former_attribute(cls, "piece", "prefill_unit")

    def prepare(self, request: Request) -> Prepared:
        """Tokenize a request, media included.

        Parameters
        ----------
        request : Request
            The request, with its media as encoded files.

        Returns
        -------
        Prepared
            Tokens of the prompt and places of its media.

        Raises
        ------
        InputError
            The request is invalid.
        """
        raise NotImplementedError(f"the engine {self.name} has no prepare: return a Prepared")

    def run(
        self,
        prepared: Prepared,
        plan: Plan = FULL,
        store: Store | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> Completion | Refusal:
        """Answer a prompt by one plan, with its request's sampling.

        After the first sent token a run ends with a completion or an error, never with a refusal.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        plan : Plan
            Plan to run. Full computation (`FULL`) is never refused.
        store : Store or None
            Store with the state of the plan's donors.
        on_token : OnToken or None
            Called with each token.

        Returns
        -------
        Completion or Refusal
            A refusal for missing, damaged or foreign state, and for a first token that
            `plan.accept` declines.

        Raises
        ------
        InputError
            The request cannot be served.
        ModelChangedError
            `prepared.epoch` is not the model's. Raised before any computation.
        """
        raise NotImplementedError(
            f"the engine {self.name} has no run: return a Completion or a Refusal"
        )

    def full(self, prepared: Prepared, *, on_token: OnToken | None = None) -> Completion:
        """Compute a prompt in full.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        on_token : OnToken or None
            Called with each token.

        Returns
        -------
        Completion
            Answer, state and counts of the run.

        Raises
        ------
        ModelError
            The engine refused full computation, which its contract forbids.
        InputError, ModelChangedError
            See `run`.
        """
        outcome = self.run(prepared, on_token=on_token)
        # Full computation is never refused, by contract: name the engine that breaks it.
        if not isinstance(outcome, Completion):
            raise ModelError(
                f"the engine {self.name} refused full computation ({outcome.reason}): return a "
                "Completion"
            )
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

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        donors : Sequence[Donor]
            Similar prompts, best first; their state is read on demand.
        config : BlendConfig or None
            Settings; None for a blend with its defaults. Settings of another piecewise method have
            a `plan_prefill`, which an engine may support.
        on_token : OnToken or None
            Called with each token.
        accept : Accept or None
            May decline the answer by its first token.

        Returns
        -------
        Completion or Refusal
            A completion with a `BlendReport` as `details["blend"]`, or the reason why it cannot
            blend.
        """
        return Refusal(f"the engine {self.name} cannot blend")

    def no_top_layer(self) -> str:
        """Return why top-layer state of similar prompts is unsupported, else an empty text.

        Returns
        -------
        str
            The reason; empty if top-layer state is supported.
        """
        warnings.warn(
            "Engine.no_top_layer is now method_named('top_layer').unsupported(engine) of "
            "dejakv.decide.method, and leaves with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return plugins.load(plugins.METHODS, "top_layer").unsupported(self)

    def costs(self, *, timed: bool = True) -> ReuseCosts | None:
        """Return the constants by which plans are compared; None if they are unknown.

        They are measured at the first call and corrected by requests. While they are unknown, the
        plan with most reuse runs.

        Parameters
        ----------
        timed : bool
            False runs nothing: until measured, costs are counted from the model's shape.

        Returns
        -------
        ReuseCosts or None
            Seconds of a row, of an attended pair, of a loaded byte and of blending; or None.
        """
        return None

    def get_ready(self, method: str) -> None:
        """Do once, beforehand, what the first request with a method would have to wait for.

        Parameters
        ----------
        method : str
            Name of the cache's method of reuse.
        """

    def without_own_state(self, prefix_tokens: int) -> "Engine":
        """Return an engine for one run that does not use the prompt's own state.

        Parameters
        ----------
        prefix_tokens : int
            Tokens of the exact prefix that may be used all the same.

        Returns
        -------
        Engine
            An engine on the same model; by default this engine itself.
        """
        return self

    def state_bytes(self) -> int:
        """Return the bytes of state that the engine itself keeps.

        Returns
        -------
        int
            Bytes of state; 0 by default.
        """
        return 0

    def weights_changed(self) -> object:
        """Take note that the owner changed the weights.

        Nothing by default. An engine whose check may see a change late fingerprints the model.

        Returns
        -------
        object
            A value that callers ignore; None by default.
        """
        return None

    def forget(self, partition: str | None) -> None:
        """Forget remembered requests of a partition, or of all (None).

        Parameters
        ----------
        partition : str or None
            Tenant; None for all.
        """

    def close(self) -> None:
        """End what the engine runs."""

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return input embeddings `[tokens, hidden]` float32, without running the decoder.

        Parameters
        ----------
        token_ids : Sequence[int]
            Token ids of the model's tokenizer.

        Returns
        -------
        NDArray[np.float32]
            One row for each token, `[tokens, hidden]`.

        Raises
        ------
        NotImplementedError
            The engine has no embeddings (the default).
        """
        raise NotImplementedError(
            f"the engine {self.name} has no embeddings: choose another index_encoder than 'model'"
        )

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Return a text's mean-pooled, normalized input embedding, `[hidden]` float32.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        NDArray[np.float32]
            Unit vector, `[hidden]`.

        Raises
        ------
        NotImplementedError
            The engine has no embeddings (the default).
        """
        raise NotImplementedError(
            f"the engine {self.name} has no embeddings: choose another index_encoder than 'model'"
        )

    def embed_image(self, media: Media) -> NDArray[np.float32]:
        """Return a picture's mean-pooled, normalized tower output, `[dim]` float32.

        Parameters
        ----------
        media : Media
            The picture.

        Returns
        -------
        NDArray[np.float32]
            Unit vector, `[dim]`.

        Raises
        ------
        NotImplementedError
            The engine has no vision tower (the default).
        """
        raise NotImplementedError(
            f"the engine {self.name} has no vision tower: choose an image-text model"
        )
