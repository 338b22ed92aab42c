"""One run of a prompt: stored state into a cache, what `generate` must not compute, the answer."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from transformers.cache_utils import Cache

from dejakv.blend.prune import PruneConfig
from dejakv.decide.costs import CostMeter
from dejakv.engines.base import Completion, Prepared
from dejakv.engines.transformers import decoding
from dejakv.engines.transformers.blending import PlannedPrefill
from dejakv.engines.transformers.capabilities import ModelCapabilities
from dejakv.engines.transformers.decoding import (
    TokenObserver,
    answer_logprobs,
    may_prune,
    prefill_pruned,
)
from dejakv.engines.transformers.fingerprint.watch import ModelWatch, Writes
from dejakv.engines.transformers.fixed_state import FixedState
from dejakv.engines.transformers.generate_call import GenerateCall
from dejakv.engines.transformers.hidden_keys import ROWS, skip_hidden_keys
from dejakv.engines.transformers.kv import empty_cache, filled_cache, stacked_state
from dejakv.engines.transformers.loading import DTYPES
from dejakv.engines.transformers.prompts import positions
from dejakv.engines.transformers.state_layout import StateLayout
from dejakv.engines.transformers.vision import ImageRows, VisionModel, feature_override
from dejakv.errors import ModelError
from dejakv.request import prefill_boundaries, reusable_tokens
from dejakv.store.base import RawTensor, StoredState, consecutive_views

_log = logging.getLogger(__name__)


@dataclass
class PromptRun:
    """One run of a prompt, from its stored state to the answer.

    Its parts are called in order: `begin`, `prefill`, `decode`, `is_state_valid`, `completion`.

    Attributes
    ----------
    model, tokenizer : Any
        The served model.
    capabilities : ModelCapabilities
        What is supported for it.
    watch : ModelWatch
        Tells whether it is what it was.
    attention : Any
        Its attention implementation, as `check_attention` returns it.
    layers : Any
        Layout of a model whose layers share KV, as `layout_of` returns it; None for others.
    base : Any
        Module that counts positions with pictures; None for a text model.
    vision : VisionModel or None
        Its tower; None if it takes no pictures.
    pruning : PruneConfig or None
        How state is pruned before the answer is decoded.
    keeps_answers : bool
        Whether the state of the answer may be captured, too.
    meter : CostMeter
        Learns from the times of the run.
    prepared : Prepared
        The tokenized request.
    planned : PlannedPrefill or None
        State of other prompts, which the prefill completes.
    observer : TokenObserver
        Sees the tokens as they come.
    prefill_unit : int
        Tokens that are computed at once; see `Prepared`.
    ids : Tensor, shape [1, prompt]
        Tokens of the prompt.
    fixed : FixedState
        Fixed state behind exactly the cached tokens; empty for a model without any.
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
    snapshots : dict[int, Callable[[], RawTensor | None]]
        Taken snapshots; see `Completion.snapshots`.
    """

    model: Any
    tokenizer: Any
    capabilities: ModelCapabilities
    watch: ModelWatch
    attention: Any
    layers: Any
    base: Any
    vision: VisionModel | None
    pruning: PruneConfig | None
    keeps_answers: bool
    meter: CostMeter
    prepared: Prepared
    planned: PlannedPrefill | None
    observer: TokenObserver
    prefill_unit: int
    ids: torch.Tensor
    fixed: FixedState
    cache: Cache | None = None
    cached_tokens: int = 0
    bytes_loaded: int = 0
    inject_s: float = 0.0
    position_ids: torch.Tensor | None = None
    rows: ImageRows | None = None
    encoder_runs: int = 0
    visible: Any = nullcontext
    decode_cache: Cache | None = None
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

    def begin(self, parts: Sequence[StoredState], cached_tokens: int, epoch: str) -> None:
        """Put stored state into a cache, and collect what the forwards need.

        Parameters
        ----------
        parts : Sequence[StoredState]
            Exact KV of the prompt's first `cached_tokens` tokens, or of more.
        cached_tokens : int
            Tokens to reuse.
        epoch : str
            Fingerprint of the model for a prompt of this length.

        Raises
        ------
        ModelError
            The state is of another model.
        """
        if self.planned is not None:
            self.cache = self.planned.cache
        else:
            self._fill(parts, cached_tokens, epoch)
        if self.missing > 1:
            self.observer.model_check = self.watch.is_unchanged
        self.inject_s = time.perf_counter() - self.observer.start_time

        if self.vision is not None:
            self.position_ids = self.vision.positions(self.ids, self.prepared)
            if self.prepared.spans:
                self.rows, self.encoder_runs = self.vision.rows(self.prepared, self.cached_tokens)
        elif self.base is not None:
            self.position_ids = positions(self.base, self.ids)

        # What leaves keys out divides the rows in its own way.
        if self.missing > ROWS and (self.planned is not None or self.prefill_unit == 1):
            self.visible = partial(skip_hidden_keys, self.model, self.attention)

    def _fill(self, parts: Sequence[StoredState], cached_tokens: int, epoch: str) -> None:
        """Fill the prompt's cache from stored parts.

        It stays None, which is the model's own cache, where ours may not hold its layers.
        """
        if not self.capabilities.reuse or not self.watch.epoch:
            return
        layout, n, device = self.capabilities.state_layout, self.tokens, self.ids.device
        if any(part.meta.epoch not in ("", epoch) for part in parts):
            raise ModelError(
                "the stored state is of another model, tokenizer or dtype: look it up under this "
                "engine's epoch"
            )

        cached_tokens = (
            reusable_tokens(cached_tokens, n, self.prefill_unit, self.prepared.spans)
            if parts
            else 0
        )
        # The model would compute the whole prompt anew.
        if not cached_tokens or (
            self.watch.by_length and not self.watch.tables.continues(cached_tokens, n)
        ):
            self.cache = layout.empty_cache() if layout is not None else empty_cache(self.layers)
            return

        snapshot = self.fixed.start
        states = consecutive_views(parts, 0, cached_tokens)
        self.bytes_loaded = sum(map(attrgetter("nbytes"), states))
        self.bytes_loaded += snapshot.nbytes if snapshot else 0
        self.cached_tokens = cached_tokens
        self.cache = (
            layout.filled_cache(states, cached_tokens, device, snapshot)
            if layout is not None
            else filled_cache(
                states, cached_tokens, device, self.model.dtype, empty_cache(self.layers)
            )
        )

    def prefill(self) -> None:
        """Compute what `generate` must not: prefill units, a prompt for all beams, pruned state."""
        prefilled, cache, n = self.cached_tokens, self.cache, self.tokens
        layout = self.capabilities.state_layout
        if self.planned is None and cache is not None:
            for stop in self._prefill_stops():
                features, self.rows = self.rows_before(prefilled, stop)
                with (
                    feature_override(self.base, features) as options,
                    self.visible(),
                    self.watch.tables.for_length(n),
                ):
                    decoding.prefill(
                        self.model, self.ids[:, :stop], cache, prefilled, self.position_ids, options
                    )
                prefilled = stop
                # Now: the next forward changes the fixed state in place.
                if layout is not None and stop in self.fixed.places:
                    self._take_snapshot(stop)
            if self.beams > 1 and layout is not None:
                layout.repeat(cache, self.beams)
            elif self.beams > 1:
                cache.batch_repeat_interleave(self.beams)

        self.decode_cache = cache
        prunes = self.beams == 1 and n > 1 and may_prune(self.prepared.request)
        # Only ordinary state can be pruned; others are computed as they are.
        if self.pruning is not None and prunes and cache is not None and layout is None:
            # Without `visible`: pruning looks at whole attention calls.
            with feature_override(self.base, self.rows) as options:
                self.decode_cache = prefill_pruned(
                    self.model, self.ids, cache, prefilled, self.position_ids, options, self.pruning
                )

            # The prefill has seen the pictures: one text token is left.
            self.rows = None

    def _take_snapshot(self, tokens: int) -> None:
        """Copy the fixed state behind `tokens` tokens, or none if there is no memory for it."""
        layout, cache = self.capabilities.state_layout, self.cache
        assert layout is not None
        assert cache is not None
        try:
            snapshot = layout.snapshot(cache)
        except (RuntimeError, MemoryError) as error:
            # The answer is worth more than the next prompt's gain.
            _log.warning("no snapshot of fixed state was taken: %s", error)
            return
        self.snapshots[tokens] = lambda: snapshot

    def _prefill_stops(self) -> list[int]:
        """Return where forwards before `generate` end."""
        n, spans = self.tokens, self.prepared.spans
        stops = [
            stop
            for stop in prefill_boundaries(n, self.prefill_unit, spans)
            if stop > self.cached_tokens
        ]
        layout, cached_tokens = self.capabilities.state_layout, self.cached_tokens
        stops = sorted({*stops, *(place for place in self.fixed.places if place > cached_tokens)})
        if cached_tokens and layout is not None and layout.token_by_token:
            stops = list(range(cached_tokens + 1, n))

        # `generate` would compute the prompt once for each beam.
        if self.beams > 1 and n - 1 > max([self.cached_tokens, *stops]):
            stops.append(n - 1)
        # Else the model would compute the prompt anew.
        return stops if stops and self.watch.tables.continues(stops[-1], n) else []

    def decode(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the rest of the prompt and the answer: one call of `generate`.

        Parameters
        ----------
        arguments : Mapping[str, Any]
            Arguments of `generate`, without those that carry the prompt.
        """
        override = feature_override(self.base, self.rows) if self.rows else nullcontext({})
        with override as features, self.visible():
            options = {**arguments, **features, "attention_mask": torch.ones_like(self.ids)}
            if self.position_ids is not None:
                options["position_ids"] = self.position_ids
            return decoding.generate(
                self.model, self.ids, self.decode_cache, options, self.observer
            )

    def is_state_valid(self, writes: Writes) -> bool:
        """Tell whether the run's state is that of its prompt, to be stored.

        Parameters
        ----------
        writes : Writes
            What was set on modules of the model meanwhile.
        """
        # A model that changed while it ran made state that is of neither.
        valid = (
            bool(self.watch.epoch)
            and not writes.changed
            and self.observer.model_unchanged
            and (self.missing <= 1 or self.watch.check(turn=False))
        )

        # The last unit was not computed as one.
        n, divided = self.tokens, self.beams > 1 or self.pruned
        return valid and not (
            divided and n in prefill_boundaries(n + 1, self.prefill_unit, self.prepared.spans)
        )

    def _is_answer_valid(self) -> bool:
        """Tell whether the state of decoded tokens, behind a valid prompt's, is to be stored."""
        request = self.prepared.request
        # In low precision tokens are computed in units, which decoding does not do.
        if not self.keeps_answers or self.prefill_unit > 1 or self.beams > 1 or self.pruned:
            return False
        # Between two tokens such code may change the model and change it back unnoticed.
        if isinstance(request, GenerateCall) and request.runs_code:
            return False
        # Else the model was checked behind the run with the prompt's state.
        return self.missing > 1 or self.watch.check(turn=False)

    def completion(self, output: Any, state_valid: bool) -> Completion:
        """Return answer, state and counts of a run; without `state_valid` no state can be captured.

        The cost meter learns from the run's times. Of several beams the best one's tokens are told
        to the observer here.

        Parameters
        ----------
        output : Any
            The result of `decode`.
        state_valid : bool
            The result of `is_state_valid`.
        """
        n, planned, observer = self.tokens, self.planned, self.observer
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        tokens = tuple(sequences[0, n:].tolist())
        if self.beams > 1:
            # Only now is the best beam known.
            for token in tokens:
                observer.tell(token)

        now, started, first = time.perf_counter(), observer.start_time, observer.first_token_time
        computed = planned.computed_tokens() if planned is not None else self.missing
        # Pictures and beams would blur what a row costs.
        if planned is None and first and not self.encoder_runs and self.beams == 1:
            self.meter.observe_prompt(computed, n, first - started - self.inject_s)

        # Only the cache outlives the run, until its state is captured.
        cache = self.cache if state_valid and planned is None else None
        layout = self.capabilities.state_layout

        with_answer = None
        if cache is not None and len(tokens) > 1 and self._is_answer_valid():
            with_answer = partial(_captured, layout, cache, n + len(tokens) - 1)
            if layout is not None and layout.fixed and not self.prepared.spans:
                self.snapshots[n + len(tokens) - 1] = partial(
                    _last_snapshot, layout, cache, n + len(tokens) - 1
                )

        # A snapshot divides the prompt: kernels of one and of several tokens round differently.
        undivided = self.cached_tokens == 0 and (self.prefill_unit > 1 or not self.fixed.places)
        exact = undivided or (self.prefill_unit > 1 and not _compiled(self.model))
        return Completion(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            prompt_tokens=n,
            computed_tokens=computed,
            encoder_runs=self.encoder_runs,
            ttft_s=(first or now) - started,
            latency_s=now - started,
            inject_s=self.inject_s,
            bytes_loaded=self.bytes_loaded,
            capture=lambda: _captured(layout, cache, n) if cache is not None else None,
            capture_with_answer=with_answer,
            rows=planned.rows() if planned is not None and state_valid else None,
            arithmetic=next((k for k, dtype in DTYPES.items() if dtype == self.model.dtype), ""),
            bitwise=planned is None and not self.pruned and exact,
            shared=not isinstance(output, torch.Tensor),
            snapshots=self.snapshots if cache is not None else {},
            continued_in_pieces=partial(
                answer_logprobs, self.model, self.decode_cache, self.ids, self.position_ids
            ),
            approximate=self.pruned,
            details={"output": output},
        )


def _captured(layout: StateLayout | None, cache: Cache, tokens: int) -> RawTensor | None:
    """Copy the state of a prompt's first tokens, for the store."""
    return layout.pack(cache, tokens) if layout is not None else stacked_state(cache, tokens)


def _last_snapshot(layout: StateLayout, cache: Cache, tokens: int) -> RawTensor | None:
    """Copy a cache's fixed state, which is that of its last token; None if that is another."""
    return layout.snapshot(cache) if cache.get_seq_length() == tokens else None


def _compiled(model: Any) -> bool:
    """Tell whether `model.compile()` was called: two programs may then compute one shape."""
    return getattr(model, "_compiled_call_impl", None) is not None
