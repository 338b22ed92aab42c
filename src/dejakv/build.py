"""From a config to a working cache: which store, which levels in which order, which guards."""

from typing import Any

from dejakv.cache import Embed, HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.dotted import made_by
from dejakv.encoders.hooks import hook_named
from dejakv.encoders.text import text_encoder
from dejakv.guards.base import Guard
from dejakv.guards.context import ContextGuard
from dejakv.guards.lexical import LexicalGuard
from dejakv.guards.media import MediaGuard
from dejakv.guards.threshold import ThresholdGuard
from dejakv.guards.vision import VisionGuard
from dejakv.identity import epoch_of
from dejakv.levels.base import Level
from dejakv.levels.exact import ExactTextCache
from dejakv.levels.latent import EmbeddingCache
from dejakv.levels.semantic import SemanticTextCache
from dejakv.store.base import Store
from dejakv.store.open import store_of


def build_cache(
    config: SemanticCacheConfig, engine: Any = None, *, store: Store | None = None, background: bool = True
) -> HierarchicalCache:
    """A cache as the config says. `engine` lends its embeddings where the config asks for the served model's own.

    Raises: ConfigError for settings that do not fit, MissingExtraError for an encoder that is not installed.
    """
    levels = build_levels(config, engine)
    fingerprints = {level.name: str(getattr(level, "fingerprint", "")) for level in levels}
    embed, hook_fingerprint = build_hook(config, engine)
    return HierarchicalCache(
        store if store is not None else store_of(config),
        levels,
        build_guards(config, levels),
        config,
        embed=embed,
        embedder=epoch_of({**fingerprints, "hook": hook_fingerprint}),
        background=background,
    )


def build_levels(config: SemanticCacheConfig, engine: Any) -> list[Level]:
    """The levels in the order of cost: exact text, latent, semantic text, then the user's own."""
    levels: list[Level] = []
    if config.exact_text:
        levels.append(ExactTextCache())
    if config.embedding_layers:
        levels.append(EmbeddingCache(config.embedding_layers, config.embedding_match, index=config.index))
    if config.semantic_text:
        embed = getattr(engine, "embed_text", None)
        encoder = text_encoder(config.index_encoder, embed=embed, fingerprint=getattr(engine, "epoch", ""))
        window = config.chunk_window
        levels.append(SemanticTextCache(encoder, config.similarity_threshold, window, index=config.index))
    levels += [made_by(dotted, "--level", ("name", "search", "add", "remove"), config) for dotted in config.levels]
    return levels


def build_hook(config: SemanticCacheConfig, engine: Any) -> tuple[Embed | None, str]:
    """What computes the latent layers' vectors of a request, and its fingerprint."""
    if not config.embedding_layers:
        return None, ""
    hook = hook_named(config.embedding_hook, config, engine)
    return hook, hook.fingerprint


def build_guards(config: SemanticCacheConfig, levels: list[Level]) -> list[Guard]:
    """Threshold first, then the pictures, the prompt around the chunk, and the words."""
    thresholds: dict[str, float] = {}
    for level in levels:
        thresholds |= getattr(level, "thresholds", {})
    guards: list[Guard] = [
        ThresholdGuard(thresholds, default=-1.0 if config.levels else None)
    ]  # own levels vouch themselves
    if config.media == "exact":
        guards.append(MediaGuard())
    elif config.media == "similar":
        guards.append(VisionGuard(thresholds["embedding:vision"]))
    guards.append(ContextGuard())
    if config.lexical_guard:
        guards.append(LexicalGuard())
    return guards
