"""The engine on Hugging Face transformers: prepare a request, run it from given state, hand the new state back."""

import copy
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from dejakv.config.reuse import PrunePolicy
from dejakv.costs import Costs
from dejakv.engines.base import Accept, Completion, OnToken, Prepared, Start, pieces
from dejakv.engines.transformers import decoding
from dejakv.engines.transformers.capabilities import (
    Capabilities,
    check_attention,
    from_config,
    self_check,
    some_tokens,
    without_adapter_wrapper,
)
from dejakv.engines.transformers.check_pictures import check_pictures
from dejakv.engines.transformers.continuation import continuation
from dejakv.engines.transformers.cost_meter import CostMeter, Shape, forward_of
from dejakv.engines.transformers.decoding import Clock
from dejakv.engines.transformers.donors import FromDonors
from dejakv.engines.transformers.embeddings import Embeddings
from dejakv.engines.transformers.features import given_features
from dejakv.engines.transformers.first_logits import asking
from dejakv.engines.transformers.hidden_keys import left_out
from dejakv.engines.transformers.kv import captured, empty_cache, filled_cache, piece_of, usable
from dejakv.engines.transformers.loading import DTYPES, load
from dejakv.engines.transformers.pictures import vision_base
from dejakv.engines.transformers.planned import Planned
from dejakv.engines.transformers.prompts import check_length, image_text_ids, positions, text_ids
from dejakv.engines.transformers.pruning import may_prune, prefill_pruned, pruning_of
from dejakv.engines.transformers.shared_kv import SharedKVPrefill, shares_kv
from dejakv.engines.transformers.vision import Vision
from dejakv.engines.transformers.watch import ModelWatch
from dejakv.engines.transformers.watched import WatchedModel
from dejakv.errors import InputError
from dejakv.request import Request, Sampling
from dejakv.reuse.prune import PruneConfig

_log = logging.getLogger(__name__)


class TransformersEngine(WatchedModel, Embeddings, FromDonors):
    """Serves one model, one request at a time (a lock keeps others waiting).

    capabilities  what holds for this model, with reasons

    trusted  see `attach`
    """

    name = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        processor: Any = None,
        *,
        encoder_cache: Any = None,
        check: bool = True,
        trusted: Iterable[str] = (),
    ) -> None:
        self.model = without_adapter_wrapper(model)
        self.tokenizer = tokenizer
        self.processor = processor
        self._attention = check_attention(self.model)
        self._lock = threading.RLock()
        self._base = vision_base(self.model)
        found = from_config(self.model)
        self.capabilities: Capabilities = self_check(self.model, found) if check else found
        self.vision = Vision.of(self.model, processor, encoder_cache) if processor is not None else None
        if self.vision is not None:
            self.capabilities = (
                check_pictures(self.model, self.vision, self.capabilities) if check else found.including("images")
            )
        if not self.capabilities.reuse:
            _log.warning("nothing is reused: %s", self.capabilities.reasons.get("reuse", ""))
        self.pruning: PruneConfig | None = None
        timed = forward_of(self.model, partial(some_tokens, self.model)) if self.capabilities.reuse else None
        self._meter = CostMeter(Shape.of(self.model, self._attention), timed)
        self._watch = ModelWatch(self.model, tokenizer, processor, self._attention, trusted)
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
        """Loads a bundled name, a folder or a hub id. `dtype` auto|fp32|bf16|fp16, `device` auto|cpu|cuda, `attn`
        sdpa|eager. `encoder_cache` (a `VisualKVCache`) keeps what the tower made of a picture; None runs it every time.
        `prune`: see `SemanticCacheConfig`.

        Raises: ModelError, ConfigError.
        """
        loaded = load(model, dtype, device, attn, trust_remote_code)
        pruning = pruning_of(prune, loaded.model)  # before the engine begins to watch the model
        engine = cls(loaded.model, loaded.tokenizer, loaded.processor, encoder_cache=encoder_cache, check=check)
        engine.pruning = pruning
        return engine

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(limit) if limit else 1 << 30

    @property
    def piece(self) -> int:
        """See `Prepared`."""
        return piece_of(self.model) if self.capabilities.reuse else 1

    @property
    def encoder_cache(self) -> Any:
        """The registry of tower outputs, None if there is none."""
        return self.vision.registry if self.vision is not None else None

    def for_arm(self, arm: str, name: str = "") -> "TransformersEngine":
        """The same model for one arm of a comparison: only `cache` has the encoder registry and prunes. Weights and lock are
        shared. Nothing here depends on the arm's `name`."""
        other = copy.copy(self)
        other.pruning = self.pruning if arm == "cache" else None
        if self.vision is not None:
            registry = self.vision.registry if arm == "cache" else None
            other.vision = replace(self.vision, registry=registry, uncounted=0, runs=0)
        return other

    def prepare(self, request: Request) -> Prepared:
        """Token ids with pictures expanded, and their spans. Pixels are processed when a picture is first seen.

        Raises: InputError for an empty or over-long prompt, an unreadable picture, or placeholders that do not match.
        """
        if not request.prompt.strip():
            raise InputError("the prompt is empty: give a question")
        if request.media and (self.vision is None or not self.capabilities.images):
            why = self.capabilities.reasons.get("images", "it is a text model")
            raise InputError(f"{type(self.model).__name__} takes no pictures ({why}): choose an image-text model")
        if self.vision is not None and (request.media or self.vision.book.image_token in request.prompt):
            with self._lock:
                ids, spans = image_text_ids(self.vision.book_of(request.partition), request.prompt, request.media)
        else:
            ids, spans = text_ids(self.tokenizer, request.prompt), ()
        check_length(self.context, len(ids))
        return Prepared(request, tuple(ids), spans, epoch=self._own_epoch(len(ids)), piece=self.piece)

    def run(
        self,
        prepared: Prepared,
        *,
        start: Start | None = None,
        sampling: Sampling | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Computes the tokens that `start` does not hold, and the answer.

        The answer's `token_ids` include the end token if one was sampled. With beams `on_token` is called for the best
        beam after the search. Raises: InputError, and ModelError for a state of another model.
        """
        return self._run(prepared, start, sampling, on_token)

    def _run(
        self,
        prepared: Prepared,
        source: Start | Planned | None,
        sampling: Sampling | None,
        on_token: OnToken | None,
        accept: Accept | None = None,
    ) -> Completion:
        sampling = sampling or prepared.request.sampling
        room = self.context - len(prepared.token_ids)
        arguments = {
            **decoding.sampling_arguments(sampling, room),
            **decoding.special_tokens(self.model, self.tokenizer),
            **decoding.stopping(sampling, self.tokenizer),
        }
        with self._lock, decoding.seeded(sampling.seed, self.device):
            return self.generate(prepared, asking(arguments, accept), source, on_token)

    def generate(
        self,
        prepared: Prepared,
        arguments: Mapping[str, Any],
        source: Start | Planned | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        """A run with `generate`'s own arguments; what it returned is in `details["output"]`."""
        planned = source if not isinstance(source, Start) else None
        start = source if isinstance(source, Start) else None
        clock = Clock()
        n = len(prepared.token_ids)
        check_length(self.context, n)
        with self._lock:
            self._check_model(prepared.epoch, n)
            ids = torch.tensor([prepared.token_ids], dtype=torch.long, device=self.device)
            piece, spans = self.piece, prepared.spans
            reuses = planned is None and self.capabilities.reuse
            held = usable(start, n, self._watch.epoch_for(n), piece, spans) if reuses else 0
            held = held if self._watch.continues(held, n) else 0
            cache, loaded = planned.cache if planned is not None else self._cache(start, held), 0
            if held and start is not None:
                loaded = start.chunk.tensor.nbytes * held // start.chunk.tensor.shape[3]
            inject = time.perf_counter() - clock.began
            rows, runs = None, 0
            place = self.vision.positions(ids, prepared) if self.vision is not None else positions(self._base, ids)
            extra: dict[str, Any] = {"position_ids": place} if place is not None else {}
            if self.vision is not None and prepared.spans:
                rows, runs = self.vision.rows(prepared, held)
            beams = decoding.width(self.model, arguments)
            # What leaves keys out divides the rows in its own way.
            visible = partial(left_out, self.model, self._attention) if planned or piece == 1 else nullcontext
            at = held
            if planned is None and cache is not None:
                stops = [stop for stop in pieces(n, piece, spans) if stop > held]
                if beams > 1 and n - 1 > max([held, *stops]):
                    stops.append(n - 1)
                if stops and not self._watch.continues(stops[-1], n):
                    stops = []  # the model would compute the prompt anew
                for stop in stops:
                    shown = sum(span.start < stop and span.start + span.length > at for span in spans)
                    own, rows = rows.divided(shown) if rows else (None, None)
                    with (
                        given_features(self._base, own) as features,
                        self._skipping(),
                        visible(),
                        self._watch.tables_of(n),
                    ):
                        decoding.prefill(self.model, ids[:, :stop], cache, at, place, features)
                    at = stop
                if beams > 1:
                    cache.batch_repeat_interleave(beams)
            used = cache
            if self.pruning is not None and beams == 1 and n > 1 and cache is not None and may_prune(prepared.request):
                with given_features(self._base, rows) as features:  # it looks at whole attention calls
                    used = prefill_pruned(self.model, ids, cache, at, place, features, self.pruning)
                rows = None
            with given_features(self._base, rows) as features, self._skipping(), visible():
                output = decoding.generate(
                    self.model,
                    ids,
                    used,
                    {**arguments, **features, **extra, "attention_mask": torch.ones_like(ids)},
                    clock=clock,
                    tokenizer=self.tokenizer,
                    on_token=on_token,
                )
            # A model that changed while it ran made state that is of neither.
            kept = bool(self.epoch) and (n - held <= 1 or self._watch.check(turn=False))
            if (beams > 1 or used is not cache) and n in pieces(n + 1, piece, spans):
                kept = False  # the last piece was not computed as one
            self._follow()
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        tokens = tuple(sequences[0, n:].tolist())
        if beams > 1 and on_token is not None:
            texts = decoding.Detokenizer(self.tokenizer)
            for token in tokens:
                on_token(token, texts.add(token))
        now = time.perf_counter()
        computed = planned.computed_tokens() if planned is not None else n - held
        if planned is None and clock.first and not runs and beams == 1:
            self._meter.computed(computed, n, clock.first - clock.began - inject)
        return Completion(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            prompt_tokens=n,
            computed_tokens=computed,
            encoder_runs=runs,
            ttft_s=(clock.first or now) - clock.began,
            latency_s=now - clock.began,
            inject_s=inject,
            bytes_loaded=loaded,
            capture=lambda: captured(cache, n) if cache is not None and kept and planned is None else None,
            rows=planned.rows() if planned is not None and kept else None,
            arithmetic=next((name for name, dtype in DTYPES.items() if dtype == self.model.dtype), ""),
            bitwise=planned is None and used is cache and (held == 0 or (piece > 1 and not _compiled(self.model))),
            shared=not isinstance(output, torch.Tensor),
            continued=continuation(self.model, used, ids, place),
            approximate=used is not cache,
            details={"output": output},
        )

    def costs(self, *, timed: bool = True) -> Costs:
        """See `KnowsCosts`."""
        if timed and not self._meter.timed:
            with self._lock:
                self._meter.time()
        return self._meter.costs()

    def loaded(self, nbytes: int, seconds: float) -> None:
        """See `KnowsCosts`."""
        self._meter.loaded(nbytes, seconds)

    def _skipping(self) -> Any:
        """While it is open, prompts skip layers that compute no KV of their own. Foreign code may want to see every row."""
        return SharedKVPrefill(self.model) if self.epoch and shares_kv(self.model) else nullcontext()

    def _cache(self, start: Start | None, held: int) -> Cache | None:
        if not self.capabilities.reuse or not self.epoch:
            return None  # the model's own cache: ours may not hold what its layers keep
        cache = empty_cache(self.model)
        if start is None or not held:
            return cache
        return filled_cache(start.chunk.tensor, held, self.device, self.model.dtype, cache)


def _compiled(model: Any) -> bool:
    """Whether `model.compile()` was called: one shape may then be computed by two programs."""
    return getattr(model, "_compiled_call_impl", None) is not None
