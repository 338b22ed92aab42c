"""Puts the cache behind a model's own `generate`, for as long as a `with` lasts.

    with dejakv.attach(model, tokenizer) as cache:
        model.generate(**inputs, max_new_tokens=32)   # computed and stored
        model.generate(**inputs, max_new_tokens=32)   # starts from the stored state

Only this one object is changed (its attribute `generate`), and it is changed back whatever happens.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.transformers.attached import AttachedModel
from dejakv.errors import ConfigError
from dejakv.pipeline import Pipeline
from dejakv.records import Record
from dejakv.request import DEFAULT_PARTITION


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
    """Caches what `model.generate` computes; it takes and returns what it always did.

    Identity is token ids and pixels. By default only equal prefixes and equal prompts are reused, so greedy answers stay
    what they were (docs/exactness.md, also for low precision); `SemanticCacheConfig(reuse="adopt", index_encoder="model")`
    also answers from similar prompts. A batch is
    served row by row. Calls that no stored state can serve (embeddings or a cache given by the caller, assisted
    decoding, hidden states of the whole prompt, a model in training mode) go to the model untouched; `on_record` is told of
    each with the reason. Before state is used the model is checked for changes, see docs/exactness.md; after a change that
    this notices late call `cache.weights_changed()`.

    model                   a causal or image-text model of transformers, or its PEFT wrapper
    processor_or_tokenizer  for image-text models the processor
    cache                   used instead of a new one made from `config`, and left open
    encoder_cache           a `VisualKVCache` to share; by default one of `config.encoder_bytes`
    on_record               called with the record of every prompt served
    trusted                 modules or packages whose classes, hooks and functions may be part of the model, by name
                            ("my_package", "__main__"). Their code is part of the model's fingerprint; what it reads from
                            elsewhere (a global variable) is not. Code that is neither an installed library's nor trusted
                            makes every prompt be computed in full

    Yields the cache. Raises: ModelError for a model that cannot be served, ConfigError if it is attached already, and for an error bound.
    """
    own = cast(dict[str, Any], vars(model))
    if "generate" in own:
        raise ConfigError("this model is attached already, or its generate was replaced: leave the other `with` first")
    settings = config or (cache.config if cache is not None else SemanticCacheConfig())
    bound = (cache.config if cache is not None else settings).error_bound
    if bound is not None:
        raise ConfigError(
            f"error_bound={bound} needs idle time in which answers are checked, and an attached model has none: use "
            "Pipeline and call run_errand between requests, or leave error_bound out"
        )
    registry = encoder_cache
    if registry is None and settings.encoder_bytes:
        registry = VisualKVCache(
            max_entries=1_000_000, max_vram_bytes=settings.encoder_bytes, ttl=settings.lifetime(settings.ttl_encoder)
        )
    if (cache.config if cache is not None else settings).unsound:
        raise ConfigError(
            "unsound=True labels texts, and generate returns token ids: use Pipeline or `dejakv run` for the study"
        )
    attached = AttachedModel(model, processor_or_tokenizer, registry, partition, on_record, trusted)
    used = cache if cache is not None else build_cache(settings, attached)
    pipeline = Pipeline(attached, used)
    attached.serve_by(lambda request: pipeline.answer(request).record)
    own["generate"] = attached.generate_call
    try:
        yield used
    finally:
        del own["generate"]
        if cache is None:
            used.close()
