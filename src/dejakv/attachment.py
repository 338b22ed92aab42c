"""The cache behind a model's own `generate`, within a `with` block.

    with dejakv.attach(model, tokenizer) as cache:
        model.generate(**inputs, max_new_tokens=32)   # computed and stored
        model.generate(**inputs, max_new_tokens=32)   # starts from the stored state

Only the attributes `generate` and `__getstate__` of this one object change, and both are always
restored.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig, switched_off
from dejakv.engines.open import encoder_registry
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.generate_call import GenerateArguments, GenerateCall, joined
from dejakv.errors import ConfigError, InputError
from dejakv.identity import check_partition
from dejakv.pipeline import Pipeline
from dejakv.records import Record
from dejakv.request import DEFAULT_PARTITION
from dejakv.store.forks import fork_safe_rlock

_log = logging.getLogger(__name__)


@contextmanager
def attach(
    model: Any,
    processor_or_tokenizer: Any,
    config: SemanticCacheConfig | None = None,
    *,
    cache: HierarchicalCache | None = None,
    encoder_cache: Any = None,
    partition: str = DEFAULT_PARTITION,
    on_record: Callable[[Record], None] | None = None,
    trusted: Iterable[str] = (),
    settle_after: float | None = None,
) -> Generator[HierarchicalCache, None, None]:
    """Serve `model.generate` through a cache, with unchanged arguments and results.

    Prompts are identified by token ids and pixels. By default only equal prefixes and equal prompts
    are reused, so greedy answers stay the same (docs/explanation/exactness.md, also for low
    precision); `SemanticCacheConfig(reuse="adopt", index_encoder="model")` also answers from
    similar prompts.

    A batch is served row by row. Unsupported calls (embeddings or a cache given by the caller,
    assisted decoding, hidden states of the whole prompt, a model in training mode) go to the model
    untouched; `on_record` gets each with the reason.

    The model is checked for changes before state is used (docs/explanation/exactness.md). After a
    change that the check sees late, call `cache.weights_changed()`.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A causal or image-text model of transformers, or its PEFT wrapper.
    processor_or_tokenizer : ProcessorMixin or PreTrainedTokenizerBase
        The processor of an image-text model, else the tokenizer.
    config : SemanticCacheConfig or None
        Settings of the new cache; by default those of `cache`, or the defaults.
    cache : HierarchicalCache or None
        Cache to use instead of a new one. It is left open at the end.
    encoder_cache : VisualKVCache or None
        Registry of encoder outputs to share; by default one is made by the settings.
    partition : str
        Whose prompts these are.
    on_record : Callable[[Record], None] or None
        Called with the record of every prompt. An exception of its own is logged, and the call goes
        on.
    trusted : Iterable[str]
        Without effect: all code of a model is read, whoever wrote it. Leaves with 0.4.
    settle_after : float or None
        Seconds without a call after which a thread labels would-be hits for the error bound, one
        at a time; a call that comes meanwhile waits for that one. The thread runs the model, so
        that nothing but `generate` may use it meanwhile. Needed for a bound. Under a bound only
        plain greedy calls (`max_new_tokens`, special tokens) may be answered approximately.

    Yields
    ------
    HierarchicalCache
        The cache that serves the model.

    Raises
    ------
    ModelError
        The model is unsupported.
    ConfigError
        The model is attached already, or a setting is wrong, needs idle time or returns text alone.
    InputError
        The partition is invalid.
    """
    if tuple(trusted):
        warnings.warn(
            "attach: trusted has no effect any more, since all code is read: leave it out",
            DeprecationWarning,
            stacklevel=3,
        )

    # The object's own attributes: its class is shared with other models.
    attributes = cast(dict[str, Any], vars(model))
    if "generate" in attributes:
        raise ConfigError(
            "this model is attached already, or its generate was replaced: leave the other `with` "
            "first"
        )

    settings = config or (cache.config if cache is not None else SemanticCacheConfig())
    cache_config = cache.config if cache is not None else settings
    if cache_config.labels_online and settle_after is None:
        raise ConfigError(
            f"error_bound={cache_config.error_bound} needs idle time in which answers are checked: "
            "give settle_after, the seconds without a call after which it begins, use Pipeline and "
            "call settle_one between requests (docs/how-to/attach.md), or leave error_bound out"
        )
    if settle_after is not None and not 0 < settle_after <= threading.TIMEOUT_MAX:
        raise ConfigError(f"settle_after={settle_after}: give seconds above 0, or None")
    if cache_config.answers == "keep":
        raise ConfigError(
            "answers=keep returns texts, and generate of an attached model returns more: use "
            "Pipeline or `dejakv serve`, or leave it out"
        )

    check_partition(partition)

    # What `torch.compile` wraps is what generates.
    wrapper, model = model, getattr(model, "_orig_mod", model)
    processor = (
        processor_or_tokenizer if hasattr(processor_or_tokenizer, "image_processor") else None
    )
    tokenizer = processor.tokenizer if processor is not None else processor_or_tokenizer
    original, registry = model.generate, encoder_cache

    with ExitStack() as cleanup:
        if (
            registry is None
            and settings.encoder_bytes
            and (registry := encoder_registry(settings)) is not None
        ):
            # Only a registry made here is closed here: a given one is its owner's.
            cleanup.callback(registry.close)

        engine = TransformersEngine(model, tokenizer, processor, encoder_cache=registry)
        used = (
            cache
            if cache is not None
            else cleanup.enter_context(closing(build_cache(settings, engine)))
        )
        attached = _AttachedGenerate(original, Pipeline(engine, used), engine, partition, on_record)
        attributes["generate"] = attached
        # At once, so that an error further down restores it too.
        cleanup.callback(attributes.pop, "generate")
        # `copy`, `pickle` and `torch.save` ask the object itself for its state: what they make is
        # not attached.
        attributes["__getstate__"] = partial(_state_alone, wrapper.__getstate__)
        cleanup.callback(attributes.pop, "__getstate__")
        if settle_after is not None and cache_config.labels_online:
            # Last, so that it ends first: before the model is given back and the cache closes.
            cleanup.enter_context(_settling(attached, settle_after, end_labels=cache is None))
        yield used


@contextmanager
def _settling(
    attached: "_AttachedGenerate", after: float, *, end_labels: bool
) -> Generator[None, None, None]:
    """Settle in a thread while nobody calls.

    Parameters
    ----------
    after : float
        Seconds without a call after which settling begins.
    end_labels : bool
        Whether a running label ends at its next token when this context is left. Labels of a cache
        that stays open are finished.
    """
    closed = threading.Event()

    def settle() -> None:
        while not closed.wait(after):
            try:
                while not closed.is_set() and attached.settle_one(after):
                    pass
            except Exception:
                # Later labels may succeed: a thread that ended would be noticed by nobody.
                _log.exception("settling failed, and goes on after %s s", after)

    thread = threading.Thread(target=settle, name="dejakv-settling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        if end_labels:
            attached.stop_settling()
        thread.join()


class _AttachedGenerate:
    """The `generate` of an attached model: one call at a time, each row of a batch as a request."""

    def __init__(
        self,
        original: Callable[..., Any],
        pipeline: Pipeline,
        engine: TransformersEngine,
        partition: str,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self._original = original
        self._pipeline = pipeline
        self._engine = engine
        self._partition = partition
        self._on_record: Callable[[Record], None] = on_record or _ignored
        self._calls = fork_safe_rlock()
        self._numbers = count(1)
        self._last_call = time.monotonic()
        """When the last call began or ended."""

    def settle_one(self, after: float) -> bool:
        """Settle one prompt if no call came for `after` seconds. False if there was none to do."""
        if self._off() or not self._pipeline.waiting:
            return False
        # A call that comes now waits for this one.
        with self._calls, torch.no_grad():
            if time.monotonic() - self._last_call < after:
                return False
            return self._pipeline.settle_one()

    def stop_settling(self) -> None:
        """End a running label at its next token."""
        self._pipeline.stop_settling()

    def __call__(self, inputs: Any = None, *args: Any, **arguments: Any) -> Any:
        """Return what the model's own `generate` would return."""
        # Before the lock: settling then ends, and does not take the lock again first.
        self._last_call = time.monotonic()
        # Reentrant: a model's `generate` may call itself.
        with self._calls, torch.no_grad():
            try:
                return self._serve(inputs, *args, **arguments)
            finally:
                self._last_call = time.monotonic()

    def _serve(self, inputs: Any, *args: Any, **arguments: Any) -> Any:
        if args:
            return self._untouched("positional arguments", inputs, *args, **arguments)
        if inputs is not None and "input_ids" in arguments:
            return self._untouched("token ids are given twice", inputs, **arguments)
        if inputs is not None:
            arguments["input_ids"] = inputs

        call = GenerateArguments(arguments, self._engine.model)
        reason = self._off() or self._engine.passthrough_reason(call)
        if reason:
            return self._untouched(reason, **arguments)
        try:
            requests = self._engine.requests_of(call, self._partition, self._numbers)
        except (ValueError, InputError) as error:
            return self._untouched(str(error), **arguments)

        cache = self._pipeline.cache
        if cache is not None and cache.config.labels_online and not call.plain_greedy:
            # Labels repeat a call, and a streamer or a sampler must not run twice.
            requests = [replace(request, reuse="exact") for request in requests]

        outputs = [self._answer(request) for request in requests]
        # A single prompt keeps the result's own form (`return_dict_in_generate`); rows are
        # joined.
        if len(outputs) == 1 and not call.padded:
            return outputs[0]
        return joined(
            outputs,
            arguments["input_ids"],
            [len(request.token_ids) for request in requests],
            call.filler,
        )

    def _answer(self, request: GenerateCall) -> Any:
        answer = self._pipeline.answer(request)
        self._tell(answer.record)
        return request.output(answer.completion.details["output"], answer.completion.prompt_tokens)

    def _untouched(self, reason: str, *args: Any, **arguments: Any) -> Any:
        self._tell(Record("untouched", reason=reason))
        return self._original(*args, **arguments)

    def _off(self) -> str:
        """Return why `DEJAKV_OFF` leaves this call to the model; empty if it does not.

        It is read at each call, since it may be set while the model is attached.
        """
        # Off from the start: the cache says so itself.
        if self._pipeline.cache is None or self._pipeline.cache.off:
            return ""
        try:
            return switched_off()
        except ConfigError as error:
            return str(error)

    def _tell(self, record: Record) -> None:
        try:
            self._on_record(record)
        except Exception:  # the caller's own code must not cost an answer
            _log.exception("on_record raised an exception")


def _state_alone(plain_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a model's state without the attributes that `attach` put there."""
    return {
        name: value
        for name, value in plain_state().items()
        if name not in ("generate", "__getstate__")
    }


def _ignored(_record: Record) -> None:
    """Do nothing: the default of `on_record`."""
