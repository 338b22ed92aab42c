"""Engine on Hugging Face transformers.

It prepares a request, runs it from stored state, and returns the new state.
"""

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from dejakv import tracing
from dejakv.blend.blend import BlendReport
from dejakv.blend.prune import PruneConfig
from dejakv.blend.sentences import sentence_ends
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import Ids
from dejakv.config import PrunePolicy
from dejakv.decide.costs import CostMeter, ReuseCosts
from dejakv.engines.base import (
    FULL,
    UNREADABLE,
    Accept,
    BlendPlan,
    Completion,
    Donor,
    Engine,
    OnToken,
    Plan,
    Prepared,
    Refusal,
    blend_donors,
    settings_of,
    unknown_plan,
    unread_reason,
)
from dejakv.engines.transformers import decoding
from dejakv.engines.transformers.blend_model import BlendModel, blend_model_of
from dejakv.engines.transformers.blending import PlannedPrefill, plan_blend
from dejakv.engines.transformers.capabilities import (
    UNCHECKED,
    ModelCapabilities,
    check_attention,
    check_pictures,
    count_costs,
    forward_of,
    from_config,
    self_check,
    without_adapter_wrapper,
)
from dejakv.engines.transformers.decoding import (
    FirstTokenDeclined,
    TokenObserver,
    answer_logprobs,
    may_prune,
    prefill_pruned,
    pruning_of,
)
from dejakv.engines.transformers.generate_call import (
    PROMPT_KEYS,
    GenerateArguments,
    GenerateCall,
    split_prompts,
)
from dejakv.engines.transformers.hidden_keys import ROWS, skip_hidden_keys
from dejakv.engines.transformers.kv import empty_cache, filled_cache, stacked_state
from dejakv.engines.transformers.loading import DTYPES, load
from dejakv.engines.transformers.model_settings import text_setting
from dejakv.engines.transformers.prompts import (
    image_text_ids,
    positions,
    spans_of,
    text_ids,
    vision_base,
)
from dejakv.engines.transformers.vision import ImageRows, VisionModel, feature_override
from dejakv.engines.transformers.watch import ModelWatch, Writes
from dejakv.errors import InputError, ModelChangedError, ModelError
from dejakv.identity import BLOCK_TOKENS, MediumSpan, digest_of
from dejakv.models.layout import layout_of
from dejakv.request import DEFAULT_PARTITION, Media, Request, prefill_boundaries, reusable_tokens
from dejakv.store.base import (
    SNAPSHOT,
    CorruptState,
    RawTensor,
    StateInfo,
    StoredState,
    consecutive_views,
)
from dejakv.store.forks import fork_safe_rlock
from dejakv.store.prefix_keys import PrefixKeys, snapshot_id
from dejakv.store.store import Store
from dejakv.vectors.base import normalized

_log = logging.getLogger(__name__)

NO_SNAPSHOT = (
    "the model keeps recurrent state, and no snapshot of it stands within the stored beginning of "
    "the prompt"
)
"""Why a stored prefix of a model with fixed state is not continued."""

_PARTING_TOKENS = 64
"""Fewest tokens that a snapshot saves where a prompt parts from a stored one."""
_SINGLE_TOKENS = 64
"""Most tokens that are computed one by one behind a snapshot, where a model needs it."""


@dataclass(frozen=True)
class _FixedState:
    """Where a run of a model with fixed state begins, and where snapshots are taken.

    Attributes
    ----------
    start : RawTensor or None
        Snapshot behind the cached tokens; None for a run from the beginning.
    places : tuple[int, ...]
        Numbers of tokens of the prompt behind which a snapshot is taken, ascending.
    """

    start: RawTensor | None = None
    places: tuple[int, ...] = ()


@dataclass
class _Run:
    """One run of a prompt, from its stored state to the answer.

    Attributes
    ----------
    cache : Cache or None
        State of the prompt; None for the model's own cache.
    cached_tokens, bytes_loaded : int
        Tokens at the beginning that are in the cache, and the bytes of their stored state.
    rows : ImageRows or None
        Rows of the pictures that no forward has seen yet.
    visible : Callable[[], ContextManager]
        Context of forwards that may leave out hidden keys.
    decode_cache : Cache or None
        State that the answer is decoded from: `cache`, or a pruned copy.
    fixed : _FixedState
        Fixed state; empty for a model without any.
    snapshots : dict[int, Callable[[], RawTensor | None]]
        Taken snapshots; see `Completion.snapshots`.
    """

    prepared: Prepared
    planned: PlannedPrefill | None
    observer: TokenObserver
    prefill_unit: int
    ids: torch.Tensor
    cache: Cache | None
    cached_tokens: int = 0
    bytes_loaded: int = 0
    inject_s: float = 0.0
    position_ids: torch.Tensor | None = None
    rows: ImageRows | None = None
    encoder_runs: int = 0
    visible: Any = nullcontext
    decode_cache: Cache | None = None
    fixed: _FixedState = _FixedState()
    snapshots: dict[int, Callable[[], RawTensor | None]] = field(
        default_factory=dict[int, Callable[[], "RawTensor | None"]]
    )

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.ids.shape[1]

    @property
    def missing(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        return self.tokens - self.cached_tokens

    @property
    def beams(self) -> int:
        """Number of sequences (rows of the batch) to which `generate` expands the prompt."""
        return self.observer.rows

    @property
    def pruned(self) -> bool:
        """Whether the answer is decoded from pruned state."""
        return self.decode_cache is not self.cache

    def rows_before(self, start: int, stop: int) -> tuple[ImageRows | None, ImageRows | None]:
        """Divide the rows into those of pictures between two tokens, and those of later ones."""
        if not self.rows:
            return None, None
        spans = self.prepared.spans
        pictures = sum(span.start < stop and span.start + span.length > start for span in spans)
        return self.rows.divided(pictures)


class TransformersEngine(Engine):
    """Serves one model, one request at a time (under a lock).

    Parameters
    ----------
    model : PreTrainedModel
        A causal or image-text model, or its PEFT wrapper.
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    processor : ProcessorMixin or None
        Processor of an image-text model.
    encoder_cache : VisualKVCache or None
        Registry of the tower's outputs; None runs the tower every time.
    check : bool
        Whether to compare reused state with full computation, once, now.

    Attributes
    ----------
    capabilities : ModelCapabilities
        What is supported for this model, with reasons.
    pruning : PruneConfig or None
        How state is pruned before the answer is decoded.

    Raises
    ------
    ModelError
        The model is no decoder, or its attention cannot continue from stored state.
    """

    name = "transformers"
    tells_first_token = True
    computes_token_ids = True
    _as_prefix_cache = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        processor: Any = None,
        *,
        encoder_cache: Any = None,
        check: bool = True,
    ) -> None:
        self.model = without_adapter_wrapper(model)
        self.tokenizer = tokenizer
        self.processor = processor
        self._attention = check_attention(self.model)
        self._lock = fork_safe_rlock()
        self._base = vision_base(self.model)
        self._layout = layout_of(self.model)

        capabilities = from_config(self.model)
        self.capabilities: ModelCapabilities = (
            self_check(self.model, capabilities)
            if check
            else capabilities.without("reuse", UNCHECKED)
            if capabilities.reuse and capabilities.state_layout is not None
            else capabilities
        )
        self.vision = (
            VisionModel.of(self.model, processor, encoder_cache) if processor is not None else None
        )
        if self.vision is not None:
            self.capabilities = (
                check_pictures(self.model, self.vision, self.capabilities)
                if check
                else capabilities.without("images", "")
            )

        if not self.capabilities.reuse:
            _log.warning("nothing is reused: %s", self.capabilities.reasons.get("reuse", ""))

        self.pruning: PruneConfig | None = None
        # A model that reuses nothing has no use for measured costs.
        timed = (
            forward_of(self.model, self.capabilities.state_layout)
            if self.capabilities.reuse
            else None
        )
        self._meter = CostMeter(count_costs(self.model, self._attention), timed)
        self._watch = ModelWatch(self.model, tokenizer, processor)
        self._update_vision()

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        dtype: str = "auto",
        device: str = "auto",
        attn: str = "sdpa",
        trust_remote_code: bool = False,
        encoder_cache: Any = None,
        check: bool = True,
        prune: PrunePolicy = "none",
    ) -> "TransformersEngine":
        """Load a model and serve it.

        Parameters
        ----------
        model : str
            A bundled name, a folder or a hub id.
        dtype : {"auto", "fp32", "bf16", "fp16"}
            Dtype of the weights.
        device : str
            `auto`, `cpu`, `cuda` or `cuda:N`.
        attn : {"sdpa", "eager"}
            Attention implementation.
        trust_remote_code : bool
            Whether to run Python code from the model's repository.
        encoder_cache : VisualKVCache or None
            Registry of the tower's outputs; None runs the tower every time.
        check : bool
            Whether to compare reused state with full computation, once, now.
        prune : PrunePolicy
            See `SemanticCacheConfig`.

        Returns
        -------
        TransformersEngine
            The engine of the loaded model.

        Raises
        ------
        ModelError
            The model is missing, damaged or unsupported.
        ConfigError
            An option is wrong.
        """
        loaded_model, tokenizer, processor = load(model, dtype, device, attn, trust_remote_code)
        # Before the engine begins to watch the model: pruning puts hooks on it.
        pruning = pruning_of(prune, loaded_model)
        engine = cls(loaded_model, tokenizer, processor, encoder_cache=encoder_cache, check=check)
        engine.pruning = pruning
        return engine

    @cached_property
    def sentence_ends(self) -> Ids | None:
        """Ids of the tokens that end a sentence; None if they are unknown."""
        return sentence_ends(self.tokenizer)

    @cached_property
    def blend_model(self) -> BlendModel | ModelError:
        """The model prepared for blending, at the first use, or why it cannot blend."""
        with self._lock:
            return blend_model_of(self.model, self.capabilities.state_layout)

    def get_ready(self, method: str) -> None:
        """Try blending on the model before the first request that asks for it.

        Parameters
        ----------
        method : str
            Name of the cache's method of reuse. Only `blend` has something to prepare.
        """
        if method == "blend" and self.capabilities.reuse:
            _ = self.blend_model

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        limit = text_setting(self.model, "max_position_embeddings")
        return int(limit) if limit else 1 << 30

    @property
    def generation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Digest of the model's generation configuration and the special tokens of an answer."""
        settings = self.model.generation_config.to_dict() | decoding.special_tokens(
            self.model, self.tokenizer
        )
        return digest_of(
            json.dumps({**settings, "transformers_version": ""}, sort_keys=True, default=str)
        )

    @property
    def prefill_unit(self) -> int:
        """Tokens of a prefill unit; see `Prepared`."""
        if not self.capabilities.reuse or self._as_prefix_cache:
            return 1
        layout = self.capabilities.state_layout
        # A model that continues token by token cannot be computed in units, whatever its dtype.
        return 1 if layout is not None and layout.token_by_token else self._watch.prefill_unit

    @property
    def encoder_cache(self) -> Any:
        """Registry of the tower's outputs; None without one."""
        return self.vision.registry if self.vision is not None else None

    def for_arm(self, arm: str, name: str = "") -> "TransformersEngine":
        """Return an engine on the same weights, under the same lock, for an arm of a comparison.

        Parameters
        ----------
        arm : str
            Only `cache` has the encoder registry and prunes. `prefix` reuses what a prefix cache
            does: whole blocks of 16 tokens in any dtype, whatever they cost.
        name : str
            Without effect.

        Returns
        -------
        TransformersEngine
            A shallow copy of this engine, which shares its weights and its lock.
        """
        # A shallow copy: weights, lock and watch are shared.
        arm_engine = copy.copy(self)
        arm_engine._as_prefix_cache = arm == "prefix"
        arm_engine.pruning = self.pruning if arm == "cache" else None

        if self.vision is not None:
            registry = self.vision.registry if arm == "cache" else None
            arm_engine.vision = replace(self.vision, registry=registry, uncounted=0, runs=0)
        return arm_engine

    def prepare(self, request: Request) -> Prepared:
        """Tokenize a request, with pictures expanded to spans.

        Pixels are processed at the first sight of a picture.

        Parameters
        ----------
        request : Request
            The request, or one prompt of a call of `generate`.

        Returns
        -------
        Prepared
            Tokens of the prompt and places of its pictures.

        Raises
        ------
        InputError
            The prompt is empty or too long, a picture is unreadable, or placeholders do not match.
        """
        if isinstance(request, GenerateCall):
            # Token ids of `generate` are the prompt: no text is tokenized.
            ids, spans = request.token_ids, request.spans
            with self._lock:
                self._take_pictures(request)
        else:
            ids, spans = self._tokenized(request)
            self._check_length(len(ids))

        # Where tables depend on the length, each length has an epoch of its own.
        prompt_epoch = self._epoch_for(len(ids)) if self._watch.by_length else ""
        prefill_unit = BLOCK_TOKENS if self._as_prefix_cache else self.prefill_unit
        return Prepared(
            request, tuple(ids), tuple(spans), epoch=prompt_epoch, prefill_unit=prefill_unit
        )

    def _tokenized(self, request: Request) -> tuple[Sequence[int], Sequence[MediumSpan]]:
        """Return a prompt's tokens and the places of its pictures."""
        if not request.prompt.strip():
            raise InputError("the prompt is empty: give a question")
        if request.media and (self.vision is None or not self.capabilities.images):
            why = self.capabilities.reasons.get("images", "it is a text model")
            raise InputError(
                f"{type(self.model).__name__} takes no pictures ({why}): choose an image-text model"
            )

        # A placeholder without a picture must be refused as well.
        if self.vision is not None and (
            request.media or self.vision.book.image_token in request.prompt
        ):
            with self._lock:
                return image_text_ids(
                    self.vision.book_of(request.partition), request.prompt, request.media
                )

        return text_ids(self.tokenizer, request.prompt), ()

    def run(
        self,
        prepared: Prepared,
        plan: Plan = FULL,
        store: Store | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> Completion | Refusal:
        """Answer a prompt by one plan; see `Engine.run`.

        The answer's `token_ids` include the end token if one was sampled. With beams `on_token` is
        called for the best beam, after the search.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        plan : Plan
            Plan to run. Full computation (`FULL`) is never refused.
        store : Store or None
            Store with the state of the plan's donors; None computes in full.
        on_token : OnToken or None
            Called with each token.

        Returns
        -------
        Completion or Refusal
            A refusal if the donors' state cannot be read, does not fit or saves too little, or if
            `plan.accept` declines the first token.
        """
        if not plan.donors or store is None:
            return self.compute(prepared, on_token=on_token)
        if isinstance(plan, BlendPlan):
            return blend_donors(self, prepared, plan, store, settings_of(plan), on_token=on_token)
        if plan.method not in ("prefix", "exact", "adopt"):
            return unknown_plan(self, plan)

        began, donor = time.perf_counter(), plan.donors[0]
        sink = decoding.TokenSink(on_token) if on_token is not None else None
        # The last token is always computed: its logits begin the answer.
        tokens = plan.reused if plan.method == "prefix" else len(donor.token_ids) - 1
        until = plan.deadline()
        # The donor's prompt runs in this one's place.
        if plan.method == "adopt":
            prepared = replace(prepared, token_ids=donor.token_ids, spans=donor.spans, inputs=None)

        fixed = None
        if self._has_fixed_state:
            tokens, fixed = self._fixed_start(prepared, donor, tokens, store, until)
            if not tokens and plan.method == "adopt":
                return Refusal(NO_SNAPSHOT)
            if not tokens:
                completion = self.compute(prepared, on_token=on_token, fixed=fixed)
                return replace(completion, exactly=NO_SNAPSHOT)

        with tracing.span("dejakv.load", {"dejakv.tokens": tokens}):
            parts = store.get_parts(donor.id, [(0, tokens)], until)
        if not parts:
            return Refusal(unread_reason(until) if plan.read_seconds else UNREADABLE)
        reading = time.perf_counter() - began

        try:
            completion = self.compute(prepared, parts, tokens, on_token=sink, fixed=fixed)
        except (ModelError, InputError, CorruptState) as error:
            # The client has seen a part of this answer: no other plan may begin one.
            if sink is not None and sink.received:
                raise
            # Or it would stand in the way of a right one for ever.
            store.delete(donor.id)
            return Refusal(f"the donor's state does not fit: {error}")

        # The store itself measures what comes from a bucket.
        if not plan.read_seconds:
            self._meter.observe_load(completion.bytes_loaded, reading + completion.inject_s)
        return completion

    @property
    def _has_fixed_state(self) -> bool:
        """Whether the model's layers keep fixed state, of which snapshots are stored."""
        layout = self.capabilities.state_layout
        return self.capabilities.reuse and layout is not None and bool(layout.fixed)

    def _fixed_start(
        self,
        prepared: Prepared,
        donor: StateInfo,
        tokens: int,
        store: Store,
        until: float | None,
    ) -> tuple[int, _FixedState]:
        """Find the longest part of a stored prefix that has a snapshot.

        Returns
        -------
        tokens : int
            Tokens before which nothing is computed; 0 without a snapshot.
        fixed : _FixedState
            The snapshot, and the places of new ones.
        """
        if prepared.spans:
            return 0, _FixedState()
        n, partition = len(prepared.token_ids), prepared.request.partition
        layout = self.capabilities.state_layout
        assert layout is not None
        tokens = reusable_tokens(tokens, n, self.prefill_unit, prepared.spans)
        if self.prefill_unit > 1:
            places = set(prefill_boundaries(n, self.prefill_unit, prepared.spans))
        else:
            # Ends of prompts, and blocks, at which prompts were seen to part.
            length = len(donor.token_ids)
            places = {length - 1, length, *range(BLOCK_TOKENS, tokens + 1, BLOCK_TOKENS)}

        # A long rest is faster in full than by one token at a time.
        first = n - 1 - _SINGLE_TOKENS if layout.token_by_token else 0
        keys = PrefixKeys(partition, prepared.epoch, prepared.token_ids, prepared.spans)
        place_of = {
            snapshot_id(place, keys.prefix_key(place)): place
            for place in sorted(places, reverse=True)
            if max(first, 1) <= place <= tokens
        }

        start, snapshot, ids = 0, None, list(place_of)
        while snapshot is None and (meta := store.first_stored(ids)) is not None:
            state = store.get(meta.id, until)
            whose = (meta.kind, meta.partition, meta.epoch)
            if state is not None and whose == (SNAPSHOT, partition, prepared.epoch):
                if layout.fits(state.tensor):
                    start, snapshot = place_of[meta.id], state.tensor
                else:
                    store.delete(meta.id)
            # Damaged, or gone meanwhile: the one before it.
            ids = ids[ids.index(meta.id) + 1 :]

        # Here this prompt parts from a stored one, as the next ones may.
        new_places = self._snapshot_places(prepared, start)
        parting = self._parting_place(prepared, tokens)
        if parting - start >= _PARTING_TOKENS and not layout.token_by_token:
            new_places = tuple(sorted({*new_places, parting}))
        return start, _FixedState(snapshot, new_places)

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: Any = None,
        *,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | Refusal:
        """Answer from similar prompts' state, token by token; see `Engine.blend`.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        donors : Sequence[Donor]
            Similar prompts, best first; their state is read on demand.
        config : BlendConfig or None
            Settings; None for a blend with its defaults. Settings of another piecewise method have
            `name`, and `plan_prefill(engine, prepared, donors)`, which returns as `plan_blend` a
            `PlannedPrefill` or None, with a `BlendReport`.
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
        began = time.perf_counter()
        sink = decoding.TokenSink(on_token) if on_token is not None else None
        config = config or BlendConfig()
        blends = isinstance(config, BlendConfig)
        if blends:
            _ = self.blend_model
        # The check of a model, once, says nothing of what a blend costs.
        ready = time.perf_counter()
        report = BlendReport(len(prepared.token_ids), reason=UNREADABLE)
        partial: PlannedPrefill | None = None

        try:
            with tracing.span("dejakv.load", {"dejakv.donors": len(donors)}) as span:
                if isinstance(config, BlendConfig):
                    partial, report = plan_blend(self, prepared, donors, config)
                else:
                    partial, report = config.plan_prefill(self, prepared, donors)
                if span is not None:
                    span.set_attributes(tracing.present({"dejakv.reason": report.reason}))
            if partial is None:
                return Refusal(report.reason, {"blend": report})

            planning = time.perf_counter() - began
            completion = self.compute(prepared, partial=partial, on_token=sink, accept=accept)
        except FirstTokenDeclined as declined:
            return Refusal(str(declined), {"blend": replace(report, reason=str(declined))})
        except ModelError as error:
            if sink is not None and sink.received:
                raise
            method = "blend" if blends else config.name
            return Refusal(f"{method}: {error}", {"blend": report})

        # The tower's run would count as a cost of the blend.
        if not completion.encoder_runs:
            blending = began + planning - ready - report.read_s + completion.ttft_s
            self._meter.observe_blend(partial.priced_rows(), report.tokens, blending)

        return replace(
            completion,
            ttft_s=completion.ttft_s + planning,
            latency_s=completion.latency_s + planning,
            inject_s=completion.inject_s + planning,
            bytes_loaded=completion.bytes_loaded + report.read_bytes,
            details={**completion.details, "blend": partial.fill_report(report)},
        )

    def compute(
        self,
        prepared: Prepared,
        parts: Sequence[StoredState] = (),
        cached_tokens: int = 0,
        *,
        partial: PlannedPrefill | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
        fixed: _FixedState | None = None,
    ) -> Completion:
        """Compute the prompt's missing rows, and the answer.

        `details["output"]` is the result of `generate`.

        Parameters
        ----------
        prepared : Prepared
            The tokenized request.
        parts : Sequence[StoredState]
            Exact KV of the prompt's first `cached_tokens` tokens, or of more.
        cached_tokens : int
            Tokens to reuse; of a prompt prefilled in units, whole units are used.
        partial : PlannedPrefill or None
            State of other prompts, which the prefill completes. Single use.
        on_token : OnToken or None
            Called with each token.
        accept : Accept or None
            Called with the first token's log probabilities; may decline it.
        fixed : _FixedState or None
            Fixed state behind exactly `cached_tokens` tokens; None for a model without any, and for
            a run from the beginning.

        Returns
        -------
        Completion
            Answer, state and counts of the run.

        Raises
        ------
        InputError
            The request cannot be served.
        ModelError
            The state is of another model.
        CorruptState
            The parts do not fit each other.
        FirstTokenDeclined
            `accept` declined.
        """
        request, sampling = prepared.request, prepared.request.sampling
        # A call of `generate` draws from the process's generators, as without DejaKV.
        seed = None
        if isinstance(request, GenerateCall):
            arguments = request.options_for(prepared.token_ids)
        else:
            arguments = decoding.sampling_arguments(
                sampling, self.context - len(prepared.token_ids), self.tokenizer
            )
            arguments |= decoding.special_tokens(self.model, self.tokenizer)
            seed = sampling.seed

        if accept is not None:
            arguments = decoding.with_accept(arguments, accept)
        drawing = decoding.seeded(seed, self.device) if seed is not None else nullcontext()
        with self._lock, drawing, self._watch.running() as writes:
            return self._generate(
                writes, prepared, arguments, parts, cached_tokens, partial, on_token, fixed
            )

    def _generate(
        self,
        writes: Writes,
        prepared: Prepared,
        arguments: Mapping[str, Any],
        parts: Sequence[StoredState],
        cached_tokens: int,
        planned: PlannedPrefill | None,
        on_token: OnToken | None,
        fixed: _FixedState | None,
    ) -> Completion:
        beams = decoding.generate_rows(self.model, arguments)
        observer = TokenObserver(beams, self.tokenizer, on_token)
        # Before any computation: state of another model must not be continued.
        self._raise_if_changed(prepared.epoch, len(prepared.token_ids))
        # A model that changed since `prepare` forgets all pictures.
        self._take_pictures(prepared.request)

        run = self._start(prepared, parts, cached_tokens, planned, observer, fixed)
        self._prefill(run)
        output = self._decode(run, arguments)
        state_valid = self._is_state_valid(run, writes)

        self._update_vision()
        return self._completion(run, output, state_valid)

    def _start(
        self,
        prepared: Prepared,
        parts: Sequence[StoredState],
        cached_tokens: int,
        planned: PlannedPrefill | None,
        observer: TokenObserver,
        fixed: _FixedState | None,
    ) -> _Run:
        """Put stored state into a cache, and collect what the forwards need."""
        ids = torch.tensor([prepared.token_ids], dtype=torch.long, device=self.device)
        if planned is not None:
            run = _Run(prepared, planned, observer, self.prefill_unit, ids, planned.cache)
        else:
            if fixed is None and self._has_fixed_state:
                # Without its snapshot stored state is of no use.
                parts, fixed = (), _FixedState(None, self._snapshot_places(prepared))
            fixed = fixed or _FixedState()
            begun = self._begun(parts, cached_tokens, prepared, fixed.start)
            run = _Run(prepared, None, observer, self.prefill_unit, ids, *begun, fixed=fixed)
        if run.missing > 1:
            observer.model_check = self._watch.is_unchanged
        run.inject_s = time.perf_counter() - observer.start_time

        if self.vision is not None:
            run.position_ids = self.vision.positions(ids, prepared)
            if prepared.spans:
                run.rows, run.encoder_runs = self.vision.rows(prepared, run.cached_tokens)
        elif self._base is not None:
            run.position_ids = positions(self._base, ids)

        # What leaves keys out divides the rows in its own way.
        if run.missing > ROWS and (planned is not None or run.prefill_unit == 1):
            run.visible = partial(skip_hidden_keys, self.model, self._attention)
        return run

    def _prefill(self, run: _Run) -> None:
        """Compute what `generate` must not: prefill units, a prompt for all beams, pruned state."""
        prefilled, cache, n = run.cached_tokens, run.cache, run.tokens
        layout = self.capabilities.state_layout
        if run.planned is None and cache is not None:
            for stop in self._prefill_stops(run):
                features, run.rows = run.rows_before(prefilled, stop)
                with (
                    feature_override(self._base, features) as options,
                    run.visible(),
                    self._watch.tables.for_length(n),
                ):
                    decoding.prefill(
                        self.model, run.ids[:, :stop], cache, prefilled, run.position_ids, options
                    )
                prefilled = stop
                # Now: the next forward changes the fixed state in place.
                if layout is not None and stop in run.fixed.places:
                    self._take_snapshot(run, stop)
            if run.beams > 1 and layout is not None:
                layout.repeat(cache, run.beams)
            elif run.beams > 1:
                cache.batch_repeat_interleave(run.beams)

        run.decode_cache = cache
        prunes = run.beams == 1 and n > 1 and may_prune(run.prepared.request)
        # Only ordinary state can be pruned; others are computed as they are.
        if self.pruning is not None and prunes and cache is not None and layout is None:
            # Without `visible`: pruning looks at whole attention calls.
            with feature_override(self._base, run.rows) as options:
                run.decode_cache = prefill_pruned(
                    self.model, run.ids, cache, prefilled, run.position_ids, options, self.pruning
                )

            # The prefill has seen the pictures: one text token is left.
            run.rows = None

    def _take_snapshot(self, run: _Run, tokens: int) -> None:
        """Copy the fixed state behind `tokens` tokens, or none if there is no memory for it."""
        layout, cache = self.capabilities.state_layout, run.cache
        assert layout is not None
        assert cache is not None
        try:
            snapshot = layout.snapshot(cache)
        except (RuntimeError, MemoryError) as error:
            # The answer is worth more than the next prompt's gain.
            _log.warning("no snapshot of fixed state was taken: %s", error)
            return
        run.snapshots[tokens] = lambda: snapshot

    def _prefill_stops(self, run: _Run) -> list[int]:
        """Return where forwards before `generate` end."""
        n, spans = run.tokens, run.prepared.spans
        stops = [
            stop
            for stop in prefill_boundaries(n, run.prefill_unit, spans)
            if stop > run.cached_tokens
        ]
        layout, cached_tokens = self.capabilities.state_layout, run.cached_tokens
        stops = sorted({*stops, *(place for place in run.fixed.places if place > cached_tokens)})
        if cached_tokens and layout is not None and layout.token_by_token:
            stops = list(range(cached_tokens + 1, n))

        # `generate` would compute the prompt once for each beam.
        if run.beams > 1 and n - 1 > max([run.cached_tokens, *stops]):
            stops.append(n - 1)
        # Else the model would compute the prompt anew.
        return stops if stops and self._watch.tables.continues(stops[-1], n) else []

    def _snapshot_places(self, prepared: Prepared, cached_tokens: int = 0) -> tuple[int, ...]:
        """Return where a prompt's last snapshot is taken, if that is behind the cached tokens.

        It is the last place at which the same prompt may begin: all but its last token, or but its
        last prefill unit. None is taken of a prompt with pictures, or of which nothing is stored.
        """
        if prepared.spans or not prepared.epoch or prepared.request.no_store:
            return ()
        n = len(prepared.token_ids)
        place = reusable_tokens(n, n, self.prefill_unit, prepared.spans)
        return (place,) if place > cached_tokens else ()

    def _parting_place(self, prepared: Prepared, tokens: int) -> int:
        """Return the last place for a snapshot within a prompt's first `tokens` tokens."""
        if self.prefill_unit == 1:
            return tokens - tokens % BLOCK_TOKENS
        n = len(prepared.token_ids)
        return reusable_tokens(tokens, n, self.prefill_unit, prepared.spans)

    def _decode(self, run: _Run, arguments: Mapping[str, Any]) -> Any:
        """Compute the rest of the prompt and the answer: one call of `generate`."""
        override = feature_override(self._base, run.rows) if run.rows else nullcontext({})
        with override as features, run.visible():
            options = {**arguments, **features, "attention_mask": torch.ones_like(run.ids)}
            if run.position_ids is not None:
                options["position_ids"] = run.position_ids
            return decoding.generate(self.model, run.ids, run.decode_cache, options, run.observer)

    def _is_state_valid(self, run: _Run, writes: Writes) -> bool:
        """Tell whether the run's state is that of its prompt, to be stored."""
        # A model that changed while it ran made state that is of neither.
        valid = (
            bool(self.epoch)
            and not writes.changed
            and run.observer.model_unchanged
            and (run.missing <= 1 or self._watch.check(turn=False))
        )

        # The last unit was not computed as one.
        n, divided = run.tokens, run.beams > 1 or run.pruned
        return valid and not (
            divided and n in prefill_boundaries(n + 1, run.prefill_unit, run.prepared.spans)
        )

    def _is_answer_valid(self, run: _Run) -> bool:
        """Tell whether the state of decoded tokens, behind a valid prompt's, is to be stored."""
        request = run.prepared.request
        # In low precision tokens are computed in units, which decoding does not do.
        if not self.keeps_answers or run.prefill_unit > 1 or run.beams > 1 or run.pruned:
            return False
        # Between two tokens such code may change the model and change it back unnoticed.
        if isinstance(request, GenerateCall) and request.runs_code:
            return False
        # Else the model was checked behind the run with the prompt's state.
        return run.missing > 1 or self._watch.check(turn=False)

    def _completion(self, run: _Run, output: Any, state_valid: bool) -> Completion:
        """Return answer, state and counts of a run; without `state_valid` no state can be captured.

        The cost meter learns from the run's times. Of several beams the best one's tokens are told
        to the observer here.
        """
        n, planned, observer = run.tokens, run.planned, run.observer
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        tokens = tuple(sequences[0, n:].tolist())
        if run.beams > 1:
            # Only now is the best beam known.
            for token in tokens:
                observer.tell(token)

        now, started, first = time.perf_counter(), observer.start_time, observer.first_token_time
        computed = planned.computed_tokens() if planned is not None else run.missing
        # Pictures and beams would blur what a row costs.
        if planned is None and first and not run.encoder_runs and run.beams == 1:
            self._meter.observe_prompt(computed, n, first - started - run.inject_s)

        # Only the cache outlives the run, until its state is captured.
        cache = run.cache if state_valid and planned is None else None

        with_answer = None
        if cache is not None and len(tokens) > 1 and self._is_answer_valid(run):
            with_answer = partial(self._capture, cache, n + len(tokens) - 1)
            if self._has_fixed_state and not run.prepared.spans:
                run.snapshots[n + len(tokens) - 1] = partial(
                    self._last_snapshot, cache, n + len(tokens) - 1
                )

        # A snapshot divides the prompt: kernels of one and of several tokens round differently.
        undivided = run.cached_tokens == 0 and (run.prefill_unit > 1 or not run.fixed.places)
        exact = undivided or (run.prefill_unit > 1 and not _compiled(self.model))
        return Completion(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            prompt_tokens=n,
            computed_tokens=computed,
            encoder_runs=run.encoder_runs,
            ttft_s=(first or now) - started,
            latency_s=now - started,
            inject_s=run.inject_s,
            bytes_loaded=run.bytes_loaded,
            capture=lambda: self._capture(cache, n) if cache is not None else None,
            capture_with_answer=with_answer,
            rows=planned.rows() if planned is not None and state_valid else None,
            arithmetic=next((k for k, dtype in DTYPES.items() if dtype == self.model.dtype), ""),
            bitwise=planned is None and not run.pruned and exact,
            shared=not isinstance(output, torch.Tensor),
            snapshots=run.snapshots if cache is not None else {},
            continued_in_pieces=partial(
                answer_logprobs, self.model, run.decode_cache, run.ids, run.position_ids
            ),
            approximate=run.pruned,
            details={"output": output},
        )

    def _last_snapshot(self, cache: Cache, tokens: int) -> RawTensor | None:
        """Copy a cache's fixed state, which is that of its last token; None if that is another."""
        layout = self.capabilities.state_layout
        if layout is None or cache.get_seq_length() != tokens:
            return None
        return layout.snapshot(cache)

    def costs(self, *, timed: bool = True) -> ReuseCosts | None:
        """Return the measured costs of this model's work; see `Engine.costs`.

        Parameters
        ----------
        timed : bool
            False runs nothing: until measured, costs are counted from the model's shape.

        Returns
        -------
        ReuseCosts or None
            Seconds of a row, of an attended pair, of a loaded byte and of blending; None for the
            arm `prefix`.
        """
        # A prefix cache reuses whatever it holds: it compares no costs.
        if self._as_prefix_cache:
            return None
        if timed and not self._meter.timed:
            with self._lock:
                self._meter.time()
        return self._meter.costs()

    @property
    def epoch(self) -> str:
        """Fingerprint of the model at its last check, which is before each run.

        It is empty if the model is unidentified.

        See docs/explanation/exactness.md.
        """
        return self._watch.epoch

    @property
    def unidentified(self) -> str:
        """Why the epoch is empty; else empty."""
        return self._watch.reason

    @property
    def no_reuse(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why the engine reuses no state of this model; empty if it does."""
        return (
            ""
            if self.capabilities.reuse
            else self.capabilities.reasons.get("reuse", "reuse is not possible")
        )

    def weights_changed(self) -> str:
        """Fingerprint the whole model again and return the epoch.

        Call it after changes that the check before a run may see late.

        Returns
        -------
        str
            The new epoch; empty if the model is unidentified.
        """
        with self._lock:
            self._watch.renew()
            self._update_vision()
            return self.epoch

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings."""
        return self.model.get_input_embeddings().weight.device

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return input embeddings `[tokens, hidden]` float32, without the decoder.

        Parameters
        ----------
        token_ids : Sequence[int]
            Token ids of the model's tokenizer.

        Returns
        -------
        NDArray[np.float32]
            One row for each token, `[tokens, hidden]`.
        """
        with torch.inference_mode():
            ids = torch.tensor(list(token_ids), dtype=torch.long, device=self.device)
            return self.model.get_input_embeddings()(ids).float().cpu().numpy()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Return the mean of a text's input embeddings at length 1, `[hidden]` float32.

        Parameters
        ----------
        text : str
            The text; no special tokens are added.

        Returns
        -------
        NDArray[np.float32]
            Unit vector, `[hidden]`.

        Raises
        ------
        InputError
            The text has no tokens.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("an empty text has no embedding: give a text")
        return normalized(self.embed_tokens(ids).mean(0))

    def embed_image(self, media: Media, partition: str = DEFAULT_PARTITION) -> NDArray[np.float32]:
        """Return the mean of a picture's rows at length 1, `[hidden]` float32.

        The tower runs if the registry lacks the rows, and its run is counted with the next request.

        Parameters
        ----------
        media : Media
            The picture.
        partition : str
            Tenant whose registry entries serve the picture.

        Returns
        -------
        NDArray[np.float32]
            Unit vector, `[hidden]`.

        Raises
        ------
        InputError
            The model takes no pictures, or this one is unreadable.
        """
        if self.vision is None:
            raise InputError(
                f"{type(self.model).__name__} takes no pictures: choose an image-text model"
            )

        with self._lock:
            self._raise_if_changed()
            features = self.vision.features(media, partition)
            self.vision.uncounted += self.vision.take_runs()

        rows = features[0] if features.dim() == 3 else features
        return normalized(rows.float().mean(0).numpy())

    def forget(self, partition: str | None) -> None:
        """Forget the pictures of a partition, or of all (None).

        Parameters
        ----------
        partition : str or None
            Tenant; None for all.
        """
        if self.vision is not None:
            with self._lock:
                self.vision.forget(partition)

    def passthrough_reason(self, call: GenerateArguments) -> str:
        """Return why a call of `generate` goes to the model untouched.

        The reason is empty if single prompts can serve it.

        Parameters
        ----------
        call : GenerateArguments
            Arguments of the call.

        Returns
        -------
        str
            The reason, in a few words; empty if there is none.
        """
        images = self.vision is not None and self.capabilities.images
        reason = call.why_unserved(images) or self._watch.momentary_reason()
        reason = reason or self.no_reuse
        if reason or not call.padded:
            return reason
        # The rows would run one by one, each with the table of its own length.
        shared = (
            "the rows of a padded batch share one rotary table" if self._watch.by_length else ""
        )
        return shared or self.capabilities.reasons.get("padding", "")

    def requests_of(
        self, call: GenerateArguments, partition: str, numbers: Iterator[int]
    ) -> list[GenerateCall]:
        """Turn a call of `generate` into a request for each prompt, with its pixels.

        Parameters
        ----------
        call : GenerateArguments
            Arguments of the call.
        partition : str
            Tenant of the requests.
        numbers : Iterator[int]
            Numbers the requests.

        Returns
        -------
        list[GenerateCall]
            One request for each row of the batch, in order.

        Raises
        ------
        InputError
            A prompt is too long.
        ValueError
            Pixels do not fit the prompts.
        """
        options = {name: value for name, value in call.explicit.items() if name not in PROMPT_KEYS}
        token = self.vision.book.image_token_id if self.vision is not None else None

        calls: list[GenerateCall] = []
        # Not strict: `numbers` may go on for ever.
        for (ids, pictures), number in zip(
            split_prompts({**call.explicit, "attention_mask": call.mask}, token),
            numbers,
            strict=False,
        ):
            media = tuple(item for item, _, _ in pictures)
            spans = spans_of(
                ids, token, [picture for _, picture, _ in pictures], [item.digest for item in media]
            )
            text, name = self.tokenizer.decode(ids, skip_special_tokens=True), f"generate-{number}"
            prompt = {"token_ids": ids, "spans": spans, "pictures": pictures}
            calls.append(
                GenerateCall(name, text, text, media, partition, **prompt, arguments=options)
            )

        for request in calls:
            self._check_length(len(request.token_ids))
        return calls

    def _take_pictures(self, request: Request) -> None:
        """Make known the pixels of a call of `generate`, which no picture's bytes stand for."""
        if isinstance(request, GenerateCall) and request.pictures and self.vision is not None:
            self.vision.book_of(request.partition).take(request.pictures)

    def _check_length(self, tokens: int) -> None:
        """Raise InputError for a prompt without tokens, or without room for an answer."""
        if tokens == 0:
            raise InputError("the prompt has no tokens: give a question")
        if tokens >= self.context:
            raise InputError(
                f"the prompt has {tokens} tokens, the model's context {self.context} with room for "
                "an answer: "
                "shorten the prompt or choose a model with a longer context"
            )

    def _raise_if_changed(self, epoch: str = "", prompt_tokens: int = 1) -> None:
        """Raise ModelChangedError if state of `epoch` is no state of the model as it is now.

        With no epoch only the model is looked at. The epoch of some models depends on the length of
        the prompt.
        """
        self._watch.check()
        self._update_vision()
        if epoch and epoch != self._epoch_for(prompt_tokens):
            raise ModelChangedError(
                "the model was changed since state was looked up for it: look it up again"
            )

    def _epoch_for(self, tokens: int) -> str:
        return (
            self._watch.tables.epoch_of(self._watch.epoch, tokens)
            if self._watch.by_length
            else self._watch.epoch
        )

    def _update_vision(self) -> None:
        if self.vision is not None:
            self.vision.set_epoch(self._watch.encoder_epoch)

    def _begun(
        self,
        parts: Sequence[StoredState],
        cached_tokens: int,
        prepared: Prepared,
        snapshot: RawTensor | None = None,
    ) -> tuple[Cache | None, int, int]:
        """Fill a prompt's cache from stored parts.

        Returns
        -------
        tuple[Cache | None, int, int]
            The cache, its number of tokens, and their bytes. None is the model's own cache, where
            ours may not hold its layers.

        Raises
        ------
        ModelError
            The state is of another model.
        """
        if not self.capabilities.reuse or not self.epoch:
            return None, 0, 0
        n, device = len(prepared.token_ids), self.device
        if not parts:
            return self._empty_cache(), 0, 0

        epoch = self._epoch_for(n)
        if any(part.meta.epoch not in ("", epoch) for part in parts):
            raise ModelError(
                "the stored state is of another model, tokenizer or dtype: look it up under this "
                "engine's epoch"
            )

        cached_tokens = reusable_tokens(cached_tokens, n, self.prefill_unit, prepared.spans)
        # The model would compute the whole prompt anew.
        if not cached_tokens or (
            self._watch.by_length and not self._watch.tables.continues(cached_tokens, n)
        ):
            return self._empty_cache(), 0, 0

        states = consecutive_views(parts, 0, cached_tokens)
        loaded_bytes = sum(map(attrgetter("nbytes"), states))
        layout = self.capabilities.state_layout
        filled = (
            layout.filled_cache(states, cached_tokens, device, snapshot)
            if layout is not None
            else filled_cache(
                states, cached_tokens, device, self.model.dtype, empty_cache(self._layout)
            )
        )
        return filled, cached_tokens, loaded_bytes + (snapshot.nbytes if snapshot else 0)

    def _empty_cache(self) -> Cache:
        """Return an empty cache for a prompt."""
        layout = self.capabilities.state_layout
        return layout.empty_cache() if layout is not None else empty_cache(self._layout)

    def _capture(self, cache: Cache, tokens: int) -> RawTensor | None:
        """Copy the state of a prompt's first tokens, for the store."""
        layout = self.capabilities.state_layout
        return layout.pack(cache, tokens) if layout is not None else stacked_state(cache, tokens)


def _compiled(model: Any) -> bool:
    """Tell whether `model.compile()` was called: two programs may then compute one shape."""
    return getattr(model, "_compiled_call_impl", None) is not None
