"""The arms of a comparison: nothing reused, prefix reuse only, the whole cache. Same engine, same samples, own stores."""

from dataclasses import replace
from typing import Any

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import Arm
from dejakv.pipeline import Pipeline


def pipeline_for(
    arm: Arm, engine: Any, config: SemanticCacheConfig, name: str = "", *, promotes: bool = False
) -> Pipeline:
    """One arm's pipeline. Only the `cache` arm has an encoder registry, a cache directory and semantic levels, and promotes.

    name  distinguishes arms of one kind, if several caches with different settings are compared; they share no state
    """
    own = engine.for_arm(arm, name or arm)
    if arm == "none":
        return Pipeline(own)
    if arm == "prefix":
        return Pipeline(own, prefix_cache(config))
    return Pipeline(own, build_cache(config, own), promotes=promotes)


def prefix_cache(config: SemanticCacheConfig) -> HierarchicalCache:
    """The prefix caching of a good engine: exact prefixes of earlier prompts, and nothing else."""
    plain = replace(
        SemanticCacheConfig(),
        exact_text=False,
        free_order=False,
        semantic_text=False,
        max_bytes=config.max_bytes,
        max_cached_blocks=config.max_cached_blocks,
        policy=config.policy,
    )
    return build_cache(plain, None)
