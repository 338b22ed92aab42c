"""Engine on Hugging Face transformers.

It prepares a request, runs it from stored state, and returns the new state.
"""

import copy
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
    NO_SNAPSHOT,
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
from dejakv.engines.transformers.decoding import FirstTokenDeclined, TokenObserver, pruning_of
from dejakv.engines.transformers.fingerprint.watch import ModelWatch
from dejakv.engines.transformers.fixed_state import FixedState, find_start, snapshot_places
from dejakv.engines.transformers.generate_call import GenerateArguments, GenerateCall, prompts_of
from dejakv.engines.transformers.loading import load
from dejakv.engines.transformers.model_settings import text_setting
from dejakv.engines.transformers.prompt_run import PromptRun
from dejakv.engines.transformers.prompts import (
    image_text_ids,
    text_ids,
    vision_base,
)
from dejakv.engines.transformers.vision import VisionModel
from dejakv.errors import InputError, ModelChangedError, ModelError
from dejakv.identity import BLOCK_TOKENS, MediumSpan, digest_of
from dejakv.models.layout import layout_of
from dejakv.request import DEFAULT_PARTITION, Media, Request
from dejakv.store.base import (
    CorruptState,
    StoredState,
)
from dejakv.store.forks import fork_safe_rlock
from dejakv.store.store import Store
from dejakv.vectors.base import normalized

_log = logging.getLogger(__name__)


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
        self._meter = CostMeter(
            count_costs(self.model, self._attention, self.capabilities.state_layout), timed
        )
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
            layout = self.capabilities.state_layout
            assert layout is not None
            tokens, fixed = find_start(layout, self.prefill_unit, prepared, tokens, store, until)
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
        fixed: FixedState | None = None,
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
        fixed : FixedState or None
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
            beams = decoding.generate_rows(self.model, arguments)
            observer = TokenObserver(beams, self.tokenizer, on_token)
            # Before any computation: state of another model must not be continued.
            self._raise_if_changed(prepared.epoch, len(prepared.token_ids))
            # A model that changed since `prepare` forgets all pictures.
            self._take_pictures(request)

            prefill_unit = self.prefill_unit
            if partial is None and fixed is None and self._has_fixed_state:
                # Without its snapshot stored state is of no use.
                parts, fixed = (), FixedState(None, snapshot_places(prefill_unit, prepared))
            run = PromptRun(
                model=self.model,
                tokenizer=self.tokenizer,
                capabilities=self.capabilities,
                watch=self._watch,
                attention=self._attention,
                layers=self._layout,
                base=self._base,
                vision=self.vision,
                pruning=self.pruning,
                keeps_answers=self.keeps_answers,
                meter=self._meter,
                prepared=prepared,
                planned=partial,
                observer=observer,
                prefill_unit=prefill_unit,
                ids=torch.tensor([prepared.token_ids], dtype=torch.long, device=self.device),
                fixed=fixed or FixedState(),
            )
            run.begin(parts, cached_tokens, self._epoch_for(len(prepared.token_ids)))
            run.prefill()
            output = run.decode(arguments)
            state_valid = run.is_state_valid(writes)

            self._update_vision()
            return run.completion(output, state_valid)

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
        token = self.vision.book.image_token_id if self.vision is not None else None
        calls = list(prompts_of(call, self.tokenizer, token, partition, numbers))
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
