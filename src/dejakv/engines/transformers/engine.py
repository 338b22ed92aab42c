"""Engine on Hugging Face transformers: prepares a request, runs it from stored state, returns the new state."""

import copy
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from dejakv.blend.blend import BlendReport
from dejakv.blend.prune import PruneConfig
from dejakv.blend.sentences import sentence_ends
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import Ids
from dejakv.blend.top_layer import TopLayerConfig
from dejakv.config import PrunePolicy, ReuseMethod
from dejakv.decide.costs import CostMeter, ReuseCosts
from dejakv.engines.base import (
    FULL,
    PIECEWISE,
    UNREADABLE,
    Accept,
    Completion,
    Donor,
    Engine,
    OnToken,
    Plan,
    Prepared,
    Refusal,
    StoredDonor,
    settings_of,
    unread,
)
from dejakv.engines.transformers import decoding
from dejakv.engines.transformers.blend_model import BlendModel, blend_model_of
from dejakv.engines.transformers.blending import PlannedBlend, plan_blend
from dejakv.engines.transformers.capabilities import (
    ModelCapabilities,
    check_attention,
    check_pictures,
    forward_of,
    from_config,
    self_check,
    shape_of,
    without_adapter_wrapper,
)
from dejakv.engines.transformers.decoding import (
    FirstTokenDeclined,
    TokenObserver,
    continued,
    may_prune,
    prefill_pruned,
    pruning_of,
)
from dejakv.engines.transformers.generate_call import PROMPT_KEYS, GenerateArguments, GenerateCall, rows_of
from dejakv.engines.transformers.hidden_keys import ROWS, left_out
from dejakv.engines.transformers.kv import captured, empty_cache, filled_cache
from dejakv.engines.transformers.loading import DTYPES, load
from dejakv.engines.transformers.model_settings import text_setting
from dejakv.engines.transformers.prompts import image_text_ids, positions, spans_of, text_ids, vision_base
from dejakv.engines.transformers.top_layer import PlannedTopLayer, plan_top_layer, why_not
from dejakv.engines.transformers.vision import VisionModel, given_features
from dejakv.engines.transformers.watch import ModelWatch, Writes
from dejakv.errors import InputError, ModelChangedError, ModelError
from dejakv.identity import BLOCK_TOKENS, MediumSpan, digest_of
from dejakv.models.lckv.layout import layout_of
from dejakv.request import DEFAULT_PARTITION, Media, Request, pieces, reusable
from dejakv.store.base import CorruptChunk, StoredState, consecutive
from dejakv.store.forks import fork_safe_rlock
from dejakv.store.store import Store
from dejakv.vectors.base import normalized

_log = logging.getLogger(__name__)


class TransformersEngine(Engine):
    """Serves one model, one request at a time (under a lock).

    capabilities  supported methods of this model, with reasons
    """

    name = "transformers"
    tells_first_token = True
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
        self.capabilities: ModelCapabilities = self_check(self.model, capabilities) if check else capabilities
        self.vision = VisionModel.of(self.model, processor, encoder_cache) if processor is not None else None
        if self.vision is not None:
            self.capabilities = (
                check_pictures(self.model, self.vision, self.capabilities)
                if check
                else capabilities.without("images", "")
            )

        if not self.capabilities.reuse:
            _log.warning("nothing is reused: %s", self.capabilities.reasons.get("reuse", ""))
        self.pruning: PruneConfig | None = None
        timed = forward_of(self.model) if self.capabilities.reuse else None
        self._meter = CostMeter(shape_of(self.model, self._attention), timed)
        self._watch = ModelWatch(self.model, tokenizer, processor)
        self._follow()

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
        """Load a bundled name, a folder or a hub id. Raises: ModelError, ConfigError.

        dtype, device, attn  auto|fp32|bf16|fp16, auto|cpu|cuda, sdpa|eager
        encoder_cache        `VisualKVCache` for the tower's outputs; None: run the tower every time
        prune                see `SemanticCacheConfig`
        """
        loaded_model, tokenizer, processor = load(model, dtype, device, attn, trust_remote_code)
        pruning = pruning_of(prune, loaded_model)  # before the engine begins to watch the model
        engine = cls(loaded_model, tokenizer, processor, encoder_cache=encoder_cache, check=check)
        engine.pruning = pruning
        return engine

    @cached_property
    def sentence_ends(self) -> Ids | None:
        """Ids of the tokens that end a sentence; None: unknown."""
        return sentence_ends(self.tokenizer)

    @cached_property
    def blend_model(self) -> BlendModel | ModelError:
        """The model prepared for blending at the first use, or why it cannot blend."""
        with self._lock:
            return blend_model_of(self.model)

    def get_ready(self, method: ReuseMethod) -> None:
        """See `Engine.get_ready`."""
        if method == "blend" and self.capabilities.reuse:
            _ = self.blend_model

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        limit = text_setting(self.model, "max_position_embeddings")
        return int(limit) if limit else 1 << 30

    @property
    def generation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Engine`: the model's generation configuration, and the special tokens of an answer."""
        settings = self.model.generation_config.to_dict() | decoding.special_tokens(self.model, self.tokenizer)
        return digest_of(json.dumps({**settings, "transformers_version": ""}, sort_keys=True, default=str))

    @property
    def piece(self) -> int:
        """See `Prepared`."""
        return self._watch.piece if self.capabilities.reuse and not self._as_prefix_cache else 1

    @property
    def encoder_cache(self) -> Any:
        """Registry of tower outputs, None without one."""
        return self.vision.registry if self.vision is not None else None

    def for_arm(self, arm: str, name: str = "") -> "TransformersEngine":
        """The same model for an arm of a comparison, with shared weights and lock. Only the arm `cache` has the encoder registry and
        prunes; the arm `prefix` reuses what a prefix cache does: whole blocks of 16 tokens in any dtype, whatever they cost. `name` has
        no effect.
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
        """Tokenize a request, with pictures expanded to spans. Pixels are processed at the first sight of a picture.

        Raises: InputError for an empty or over-long prompt, an unreadable picture, or placeholders that do not match.
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
        prefill_unit = BLOCK_TOKENS if self._as_prefix_cache else self.piece
        return Prepared(request, tuple(ids), tuple(spans), epoch=prompt_epoch, piece=prefill_unit)

    def _tokenized(self, request: Request) -> tuple[Sequence[int], Sequence[MediumSpan]]:
        if not request.prompt.strip():
            raise InputError("the prompt is empty: give a question")
        if request.media and (self.vision is None or not self.capabilities.images):
            why = self.capabilities.reasons.get("images", "it is a text model")
            raise InputError(f"{type(self.model).__name__} takes no pictures ({why}): choose an image-text model")
        # A placeholder without a picture must be refused as well.
        if self.vision is not None and (request.media or self.vision.book.image_token in request.prompt):
            with self._lock:
                return image_text_ids(self.vision.book_of(request.partition), request.prompt, request.media)

        return text_ids(self.tokenizer, request.prompt), ()

    def run(
        self, prepared: Prepared, plan: Plan = FULL, store: Store | None = None, *, on_token: OnToken | None = None
    ) -> Completion | Refusal:
        """See `Engine.run`. The answer's `token_ids` include the end token if one was sampled. With beams `on_token` is called for the
        best beam after the search."""
        if not plan.donors or store is None:
            return self.compute(prepared, on_token=on_token)
        if plan.method in PIECEWISE:
            until = plan.deadline()
            donors = [StoredDonor(store, meta, until) for meta in plan.donors]
            outcome = self.blend(prepared, donors, settings_of(plan), on_token=on_token, accept=plan.accept)
            # State in a bucket may have missed its deadline instead.
            if plan.away and isinstance(outcome, Refusal) and outcome.reason == UNREADABLE:
                return replace(outcome, reason=unread(until))
            return outcome

        began, donor = time.perf_counter(), plan.donors[0]
        sink = decoding.TokenSink(on_token) if on_token is not None else None
        # The last token is always computed: its logits begin the answer.
        tokens = plan.reused if plan.method == "prefix" else len(donor.token_ids) - 1
        until = plan.deadline()
        parts = store.get_parts(donor.id, [(0, tokens)], until)
        if not parts:
            return Refusal(unread(until) if plan.away else UNREADABLE)
        reading = time.perf_counter() - began
        if plan.method == "adopt":  # the donor's prompt runs in this one's place
            prepared = replace(prepared, token_ids=donor.token_ids, spans=donor.spans, inputs=None)

        try:
            completion = self.compute(prepared, parts, tokens, on_token=sink)
        except (ModelError, InputError, CorruptChunk) as error:
            if sink is not None and sink.any:  # the client has seen a part of this answer
                raise
            store.delete(donor.id)  # or it would stand in the way of a right one for ever
            return Refusal(f"the donor's state does not fit: {error}")
        if not plan.away:  # the store measures what comes from a bucket
            self._meter.loaded(completion.bytes_loaded, reading + completion.inject_s)
        return completion

    def blend(
        self,
        prepared: Prepared,
        donors: Sequence[Donor],
        config: BlendConfig | TopLayerConfig | None = None,
        *,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion | Refusal:
        """See `Engine.blend`."""
        began, sink = time.perf_counter(), decoding.TokenSink(on_token) if on_token is not None else None
        if not isinstance(config, TopLayerConfig):
            _ = self.blend_model
        ready = time.perf_counter()  # the check of a model, once, says nothing of what a blend costs
        # The reason if no donor can be read.
        report = BlendReport(len(prepared.token_ids), reason=UNREADABLE)
        partial: PlannedBlend | PlannedTopLayer | None = None

        try:
            if isinstance(config, TopLayerConfig):
                chunks = [chunk for donor in donors if (chunk := donor.whole()) is not None]
                if chunks:
                    partial, report = plan_top_layer(self, prepared, chunks, config)
            else:
                partial, report = plan_blend(self, prepared, donors, config or BlendConfig())
            if partial is None:
                return Refusal(report.reason, {"blend": report})

            planning = time.perf_counter() - began
            completion = self.compute(prepared, partial=partial, on_token=sink, accept=accept)
        except FirstTokenDeclined as declined:
            return Refusal(str(declined), {"blend": replace(report, reason=str(declined))})
        except ModelError as error:
            if sink is not None and sink.any:
                raise
            method = "top_layer" if isinstance(config, TopLayerConfig) else "blend"
            return Refusal(f"{method}: {error}", {"blend": report})
        # The tower's run would count as a cost of the blend.
        if not completion.encoder_runs:
            blending = began + planning - ready - report.read_s + completion.ttft_s
            self._meter.blended(partial.priced_rows(), report.tokens, blending)

        return replace(
            completion,
            ttft_s=completion.ttft_s + planning,
            latency_s=completion.latency_s + planning,
            inject_s=completion.inject_s + planning,
            bytes_loaded=completion.bytes_loaded + report.read_bytes,
            details={**completion.details, "blend": partial.told(report)},
        )

    def no_top_layer(self) -> str:
        """See `Engine.no_top_layer`."""
        return why_not(self)

    def compute(
        self,
        prepared: Prepared,
        parts: Sequence[StoredState] = (),
        cached_tokens: int = 0,
        *,
        partial: PlannedBlend | PlannedTopLayer | None = None,
        on_token: OnToken | None = None,
        accept: Accept | None = None,
    ) -> Completion:
        """Compute rows without given state, and the answer; `details["output"]` is the result of `generate`.

        parts    exact KV of the prompt's first `cached_tokens` tokens, or of more; for a prompt prefilled in pieces, of whole pieces
        partial  single-use state of other prompts, completed by the prefill
        accept   called with the first token's log probabilities

        Raises: InputError; ModelError for a state of another model; CorruptChunk for parts that do not fit each other; Declined.
        """
        request, sampling = prepared.request, prepared.request.sampling
        # A call of `generate` draws from the process's generators, as without DejaKV.
        seed = None
        if isinstance(request, GenerateCall):
            arguments = request.options_for(prepared.token_ids)
        else:
            arguments = decoding.sampling_arguments(sampling, self.context - len(prepared.token_ids), self.tokenizer)
            arguments |= decoding.special_tokens(self.model, self.tokenizer)
            seed = sampling.seed

        if accept is not None:
            arguments = decoding.asking(arguments, accept)
        drawing = decoding.seeded(seed, self.device) if seed is not None else nullcontext()
        with self._lock, drawing, self._watch.running() as writes:
            return self._generate(writes, prepared, arguments, parts, cached_tokens, partial, on_token)

    def _generate(
        self,
        writes: Writes,
        prepared: Prepared,
        arguments: Mapping[str, Any],
        parts: Sequence[StoredState],
        cached_tokens: int,
        planned: PlannedBlend | PlannedTopLayer | None,
        on_token: OnToken | None,
    ) -> Completion:
        beams, n, spans = decoding.width(self.model, arguments), len(prepared.token_ids), prepared.spans
        steps = TokenObserver(beams, self.tokenizer, on_token)
        # Before any computation: state of another model must not be continued.
        self._check_model(prepared.epoch, n)
        self._take_pictures(prepared.request)  # a model that changed since `prepare` forgets all pictures

        piece = self.piece
        ids = torch.tensor([prepared.token_ids], dtype=torch.long, device=self.device)
        cache, cached_tokens, loaded_bytes = (
            (planned.cache, 0, 0) if planned is not None else self._begun(parts, cached_tokens, prepared)
        )
        if n - cached_tokens > 1:
            steps.look = self._watch.same
        inject = time.perf_counter() - steps.began

        rows, runs, position_ids = None, 0, None
        if self.vision is not None:
            position_ids = self.vision.positions(ids, prepared)
            if spans:
                rows, runs = self.vision.rows(prepared, cached_tokens)
        elif self._base is not None:
            position_ids = positions(self._base, ids)
        # What leaves keys out divides the rows in its own way.
        visible: Any = nullcontext
        if n - cached_tokens > ROWS and (planned is not None or piece == 1):
            visible = partial(left_out, self.model, self._attention)

        prefilled = cached_tokens
        if planned is None and cache is not None:
            stops = [stop for stop in pieces(n, piece, spans) if stop > cached_tokens] if piece > 1 else []
            # `generate` would compute the prompt once for each beam.
            if beams > 1 and n - 1 > max([cached_tokens, *stops]):
                stops.append(n - 1)
            if stops and not self._watch.tables.continues(stops[-1], n):
                stops = []  # the model would compute the prompt anew
            for stop in stops:
                piece_pictures = sum(span.start < stop and span.start + span.length > prefilled for span in spans)
                piece_rows, rows = rows.divided(piece_pictures) if rows else (None, None)
                with given_features(self._base, piece_rows) as features, visible(), self._watch.tables.of(n):
                    decoding.prefill(self.model, ids[:, :stop], cache, prefilled, position_ids, features)
                prefilled = stop
            if beams > 1:
                cache.batch_repeat_interleave(beams)

        decode_cache = cache
        if self.pruning is not None and beams == 1 and n > 1 and cache is not None and may_prune(prepared.request):
            with given_features(self._base, rows) as features:  # it looks at whole attention calls
                decode_cache = prefill_pruned(self.model, ids, cache, prefilled, position_ids, features, self.pruning)
            # The prefill has seen the pictures: one text token is left.
            rows = None

        with given_features(self._base, rows) if rows else nullcontext({}) as features, visible():
            generate_args = {**arguments, **features, "attention_mask": torch.ones_like(ids)}
            if position_ids is not None:
                generate_args["position_ids"] = position_ids
            output = decoding.generate(self.model, ids, decode_cache, generate_args, steps)
        # A model that changed while it ran made state that is of neither.
        state_valid = (
            bool(self.epoch)
            and not writes.any
            and steps.same
            and (n - cached_tokens <= 1 or self._watch.check(turn=False))
        )
        if (beams > 1 or decode_cache is not cache) and n in pieces(n + 1, piece, spans):
            state_valid = False  # the last piece was not computed as one

        self._follow()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        tokens = tuple(sequences[0, n:].tolist())
        if beams > 1:
            # Only now is the best beam known.
            for token in tokens:
                steps.tell(token)

        now = time.perf_counter()
        arithmetic = next((name for name, dtype in DTYPES.items() if dtype == self.model.dtype), "")
        computed = planned.computed_tokens() if planned is not None else n - cached_tokens
        # Pictures and beams would blur what a row costs.
        if planned is None and steps.first and not runs and beams == 1:
            self._meter.computed(computed, n, steps.first - steps.began - inject)

        return Completion(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            prompt_tokens=n,
            computed_tokens=computed,
            encoder_runs=runs,
            ttft_s=(steps.first or now) - steps.began,
            latency_s=now - steps.began,
            inject_s=inject,
            bytes_loaded=loaded_bytes,
            capture=lambda: captured(cache, n) if cache is not None and state_valid and planned is None else None,
            rows=planned.rows() if planned is not None and state_valid else None,
            arithmetic=arithmetic,
            bitwise=planned is None
            and decode_cache is cache
            and (cached_tokens == 0 or (piece > 1 and not _compiled(self.model))),
            shared=not isinstance(output, torch.Tensor),
            continued=partial(continued, self.model, decode_cache, ids, position_ids),
            approximate=decode_cache is not cache,
            details={"output": output},
        )

    def costs(self, *, timed: bool = True) -> ReuseCosts | None:
        """See `Engine.costs`."""
        if self._as_prefix_cache:
            return None
        if timed and not self._meter.timed:
            with self._lock:
                self._meter.time()
        return self._meter.costs()

    @property
    def epoch(self) -> str:
        """Fingerprint of the model at its last check, before each run (docs/explanation/exactness.md). Empty: the model is unidentified."""
        return self._watch.epoch

    @property
    def unidentified(self) -> str:
        """Why the epoch is empty; else empty."""
        return self._watch.reason

    @property
    def no_reuse(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Engine`."""
        return "" if self.capabilities.reuse else self.capabilities.reasons.get("reuse", "reuse is not possible")

    def weights_changed(self) -> str:
        """Fingerprint the whole model again and return the epoch; call it after changes that the check before a run may see late."""
        with self._lock:
            self._watch.renew()
            self._follow()
            return self.epoch

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def embed_tokens(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Input embeddings `[tokens, hidden]` float32 of plain tokens, without running the decoder."""
        with torch.inference_mode():
            ids = torch.tensor(list(token_ids), dtype=torch.long, device=self.device)
            return self.model.get_input_embeddings()(ids).float().cpu().numpy()

    def embed_text(self, text: str) -> NDArray[np.float32]:
        """Mean of a text's input embeddings at length 1, `[hidden]` float32. Raises: InputError for an empty text."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("an empty text has no embedding: give a text")
        return normalized(self.embed_tokens(ids).mean(0))

    def embed_image(self, media: Media, partition: str = DEFAULT_PARTITION) -> NDArray[np.float32]:
        """Mean of the picture's rows at length 1, `[hidden]` float32. Runs the tower if the registry lacks them, counted with the next
        request. Raises: InputError.
        """
        if self.vision is None:
            raise InputError(f"{type(self.model).__name__} takes no pictures: choose an image-text model")

        with self._lock:
            self._check_model()
            features = self.vision.features(media, partition)
            self.vision.uncounted += self.vision.take_runs()

        rows = features[0] if features.dim() == 3 else features
        return normalized(rows.float().mean(0).numpy())

    def forget(self, partition: str | None) -> None:
        """Forget pictures."""
        if self.vision is not None:
            with self._lock:
                self.vision.forget(partition)

    def untouchable(self, call: GenerateArguments) -> str:
        """Why a call of `generate` goes to the model untouched; empty if single prompts can serve it."""
        images = self.vision is not None and self.capabilities.images
        reason = call.why_untouched(images) or self._watch.momentary()
        reason = reason or self.no_reuse
        if reason or not call.padded:
            return reason
        shared = "the rows of a padded batch share one rotary table" if self._watch.by_length else ""
        return shared or self.capabilities.reasons.get("padding", "")

    def requests_of(self, call: GenerateArguments, partition: str, numbers: Iterator[int]) -> list[GenerateCall]:
        """Turn a call of `generate` into a request for each prompt, numbered by `numbers`, with its pixels.

        Raises: InputError for a prompt that is too long, ValueError for pixels that do not fit it.
        """
        options = {name: value for name, value in call.given.items() if name not in PROMPT_KEYS}
        token = self.vision.book.image_token_id if self.vision is not None else None

        calls: list[GenerateCall] = []
        # Not strict: `numbers` may go on for ever.
        for (ids, pictures), number in zip(
            rows_of({**call.given, "attention_mask": call.mask}, token), numbers, strict=False
        ):
            media = tuple(item for item, _, _ in pictures)
            spans = spans_of(ids, token, [picture for _, picture, _ in pictures], [item.digest for item in media])
            text, name = self.tokenizer.decode(ids, skip_special_tokens=True), f"generate-{number}"
            prompt = {"token_ids": ids, "spans": spans, "pictures": pictures}
            calls.append(GenerateCall(name, text, text, media, partition, **prompt, arguments=options))

        for request in calls:
            self._check_length(len(request.token_ids))
        return calls

    def _take_pictures(self, request: Request) -> None:
        """Make the pixels of a call of `generate` known, which no picture's bytes stand for."""
        if isinstance(request, GenerateCall) and request.pictures and self.vision is not None:
            self.vision.book_of(request.partition).take(request.pictures)

    def _check_length(self, tokens: int) -> None:
        """Raises: InputError for a prompt without tokens, or without room for an answer."""
        if tokens == 0:
            raise InputError("the prompt has no tokens: give a question")
        if tokens >= self.context:
            raise InputError(
                f"the prompt has {tokens} tokens, the model's context {self.context} with room for an answer: "
                "shorten the prompt or choose a model with a longer context"
            )

    def _check_model(self, expected: str = "", tokens: int = 1) -> None:
        """Raises: ModelChangedError if the model, for a prompt of `tokens`, changed since the lookup."""
        self._watch.check()
        self._follow()
        if expected and expected != self._epoch_for(tokens):
            raise ModelChangedError("the model was changed since state was looked up for it: look it up again")

    def _epoch_for(self, tokens: int) -> str:
        return self._watch.tables.epoch_of(self._watch.epoch, tokens) if self._watch.by_length else self._watch.epoch

    def _follow(self) -> None:
        if self.vision is not None:
            self.vision.follow(self._watch.encoder_epoch)

    def _begun(
        self, parts: Sequence[StoredState], cached_tokens: int, prepared: Prepared
    ) -> tuple[Cache | None, int, int]:
        """Fill a prompt's cache from stored parts. Returns it, its number of tokens, and their bytes.

        None: the model's own cache, if ours may not hold its layers. Raises: ModelError for state of another model.
        """
        if not self.capabilities.reuse or not self.epoch:
            return None, 0, 0
        n, device, piece = len(prepared.token_ids), self.device, self.piece
        if not parts:
            return empty_cache(self._layout), 0, 0

        epoch = self._epoch_for(n)
        if any(part.meta.epoch not in ("", epoch) for part in parts):
            raise ModelError(
                "the stored state is of another model, tokenizer or dtype: look it up under this engine's epoch"
            )

        cached_tokens = reusable(cached_tokens, n, piece, prepared.spans)
        # The model would compute the whole prompt anew.
        if not cached_tokens or (self._watch.by_length and not self._watch.tables.continues(cached_tokens, n)):
            return empty_cache(self._layout), 0, 0

        states = consecutive(parts, 0, cached_tokens)
        loaded_bytes = sum(map(attrgetter("nbytes"), states))
        return (
            filled_cache(states, cached_tokens, device, self.model.dtype, empty_cache(self._layout)),
            cached_tokens,
            loaded_bytes,
        )


def _compiled(model: Any) -> bool:
    """Whether `model.compile()` was called: two programs may then compute one shape."""
    return getattr(model, "_compiled_call_impl", None) is not None
