"""The arms of a comparison: nothing reused, prefix reuse only, the whole cache. Same engine, same samples, own stores."""

from dataclasses import replace
from typing import Any

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import Arm
from dejakv.pipeline import Pipeline


def pipeline_for(arm: Arm, engine: Any, config: SemanticCacheConfig) -> Pipeline:
    """One arm's pipeline. Only the `cache` arm has an encoder registry, a cache directory and semantic levels."""
    if arm == "none":
        return Pipeline(engine.for_arm("none"))
    if arm == "prefix":
        return Pipeline(engine.for_arm("prefix"), prefix_cache(config))
    whole = engine.for_arm("cache")
    return Pipeline(whole, build_cache(config, whole))


def prefix_cache(config: SemanticCacheConfig) -> HierarchicalCache:
    """What a good engine does anyway: exact prefixes of earlier prompts, and nothing else."""
    plain = replace(
        SemanticCacheConfig(),
        exact_text=False,
        semantic_text=False,
        max_bytes=config.max_bytes,
        max_cached_blocks=config.max_cached_blocks,
        policy=config.policy,
    )
    return build_cache(plain, None)
