"""Puts the cache behind a model's own `generate` within a `with` block.

    with dejakv.attach(model, tokenizer) as cache:
        model.generate(**inputs, max_new_tokens=32)   # computed and stored
        model.generate(**inputs, max_new_tokens=32)   # starts from the stored state

Changes only this object's attributes `generate` and `__getstate__`, and always restores them.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
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
) -> Generator[HierarchicalCache, None, None]:
    """Serve `model.generate` through a cache, with unchanged arguments and results.

    Prompts are identified by token ids and pixels. By default only equal prefixes and equal prompts are reused, so greedy answers stay
    the same (docs/explanation/exactness.md, also for low precision); `SemanticCacheConfig(reuse="adopt", index_encoder="model")` also answers from
    similar prompts. A batch is served row by row. Unsupported calls (embeddings or a cache given by the caller, assisted decoding, hidden
    states of the whole prompt, a model in training mode) go to the model untouched; `on_record` gets each with the reason. The model is
    checked for changes before state is used (docs/explanation/exactness.md); after a change that the check sees late, call `cache.weights_changed()`.

    model                   a causal or image-text model of transformers, or its PEFT wrapper
    processor_or_tokenizer  for image-text models the processor
    cache                   used instead of a new one made from `config`, and left open
    encoder_cache           a `VisualKVCache` to share; by default one by `config`
    on_record               called with the record of every prompt served; what it raises is logged, and the call goes on
    trusted                 has no effect any more, and leaves with 0.4: all code of a model is read, whoever wrote it

    Yields the cache. Raises: ModelError for an unsupported model, ConfigError for an attached one, and for an error bound.
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
        raise ConfigError("this model is attached already, or its generate was replaced: leave the other `with` first")
    settings = config or (cache.config if cache is not None else SemanticCacheConfig())
    cache_config = cache.config if cache is not None else settings
    if cache_config.labels_online:
        raise ConfigError(
            f"error_bound={cache_config.error_bound} needs idle time in which answers are checked, and an attached model has none: use "
            "Pipeline and call settle_one between requests (docs/how-to/attach.md), or leave error_bound out"
        )
    if cache_config.answers == "keep":
        raise ConfigError(
            "answers=keep returns texts, and generate of an attached model returns more: use Pipeline or `dejakv serve`, or leave it out"
        )

    check_partition(partition)
    wrapper, model = model, getattr(model, "_orig_mod", model)  # what `torch.compile` wraps is what generates
    processor = processor_or_tokenizer if hasattr(processor_or_tokenizer, "image_processor") else None
    tokenizer = processor.tokenizer if processor is not None else processor_or_tokenizer
    original, registry = model.generate, encoder_cache

    with ExitStack() as cleanup:
        if registry is None and settings.encoder_bytes and (registry := encoder_registry(settings)) is not None:
            cleanup.callback(registry.close)

        engine = TransformersEngine(model, tokenizer, processor, encoder_cache=registry)
        used = cache if cache is not None else cleanup.enter_context(closing(build_cache(settings, engine)))
        attributes["generate"] = _AttachedGenerate(original, Pipeline(engine, used), engine, partition, on_record)
        # At once, so that an error further down restores it too.
        cleanup.callback(attributes.pop, "generate")
        # `copy`, `pickle` and `torch.save` ask the object itself for its state: what they make is not attached.
        attributes["__getstate__"] = partial(_state_alone, wrapper.__getstate__)
        cleanup.callback(attributes.pop, "__getstate__")
        yield used


class _AttachedGenerate:
    """`model.generate` while attached. Serves one call at a time, each row of a batch as a request."""

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

    def __call__(self, inputs: Any = None, *args: Any, **arguments: Any) -> Any:
        """Return the result of the model's own `generate`."""
        # Reentrant: a model's `generate` may call itself.
        with self._calls, torch.no_grad():
            if args:
                return self._untouched("positional arguments", inputs, *args, **arguments)
            if inputs is not None and "input_ids" in arguments:
                return self._untouched("token ids are given twice", inputs, **arguments)
            if inputs is not None:
                arguments["input_ids"] = inputs

            call = GenerateArguments(arguments, self._engine.model)
            reason = self._off() or self._engine.untouchable(call)
            if reason:
                return self._untouched(reason, **arguments)
            try:
                requests = self._engine.requests_of(call, self._partition, self._numbers)
            except (ValueError, InputError) as error:
                return self._untouched(str(error), **arguments)

            outputs = [self._answer(request) for request in requests]
            if len(outputs) == 1 and not call.padded:
                return outputs[0]
            return joined(
                outputs, arguments["input_ids"], [len(request.token_ids) for request in requests], call.filler
            )

    def _answer(self, request: GenerateCall) -> Any:
        answer = self._pipeline.answer(request)
        self._tell(answer.record)
        return request.output(answer.completion.details["output"], answer.completion.prompt_tokens)

    def _untouched(self, reason: str, *args: Any, **arguments: Any) -> Any:
        self._tell(Record("untouched", reason=reason))
        return self._original(*args, **arguments)

    def _off(self) -> str:
        """Why `DEJAKV_OFF`, set while the model is attached, leaves this call to the model; empty if it does not."""
        if self._pipeline.cache is None or self._pipeline.cache.off:  # off from the start: the cache says so itself
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
    """Return a model's state without what `attach` put there."""
    return {name: value for name, value in plain_state().items() if name not in ("generate", "__getstate__")}


def _ignored(_record: Record) -> None:
    """Default of `on_record`."""
