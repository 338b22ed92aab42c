"""Construction of a cache from its settings: store, levels in order, guards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dejakv import plugins
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.finder import Embed, no_vectors
from dejakv.decide.guards.base import ContextGuard, Guard, MediaGuard, ThresholdGuard
from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.decide.levels.base import Level
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import StoringObserver
from dejakv.errors import ConfigError
from dejakv.identity import epoch_of
from dejakv.settings import import_object, make_from_factory
from dejakv.store.open import store_of
from dejakv.store.store import Store
from dejakv.trust.evidence import fingerprint
from dejakv.trust.gate import TrustGate
from dejakv.trust.ledger import EvidenceLedger
from dejakv.vectors.hooks import check_hook, make_hook
from dejakv.vectors.spaces import LayerSpec
from dejakv.vectors.text import sentence_width, text_encoder


def build_cache(
    config: SemanticCacheConfig,
    engine: Any = None,
    *,
    store: Store | None = None,
    levels: Sequence[Level] = (),
    guards: Sequence[Guard] = (),
    background: bool = True,
) -> HierarchicalCache:
    """Build the cache of a config.

    Parameters
    ----------
    config : SemanticCacheConfig
        Settings of the cache.
    engine : Engine or None
        Gives the embeddings, if the config asks for those of the served model.
    store : Store or None
        Store to use instead of the config's.
    levels : Sequence[Level]
        Levels of the caller, asked before those of the config.
    guards : Sequence[Guard]
        Guards of the caller, asked first. A guard takes the place of the config's guard of its
        name.
    background : bool
        Whether to store and index in the background.

    Returns
    -------
    HierarchicalCache
        The cache. Closing it closes its store.

    Raises
    ------
    ConfigError
        Settings do not fit each other or the engine.
    MissingExtraError
        An encoder, or a package that the store needs, is not installed.
    StoreError
        The store, or the folder of a bound's evidence, cannot be used.
    ModelError
        An encoder is missing or damaged.
    """
    used = [*levels, *build_levels(config, engine)]
    # The caller's guard of a name stands in for the config's.
    names = {guard.name for guard in guards}
    default_guards = [guard for guard in build_guards(config, used) if guard.name not in names]

    embed, hook_fingerprint = build_hook(config, engine)
    return HierarchicalCache(
        store if store is not None else store_of(config),
        used,
        [*guards, *default_guards],
        config,
        embed=embed,
        fusion=build_fusion(config, engine),
        gate=build_gate(config),
        embedder=epoch_of({**fingerprints_of(used), "hook": hook_fingerprint}),
        background=background,
    )


def check_config(config: SemanticCacheConfig) -> None:
    """Check names and layers as `build_cache` does, before a model is loaded.

    Raises
    ------
    ConfigError
        A name cannot be imported, or a layer is invalid.
    """
    if config.embedding_layers:
        # Made and dropped: its constructor has the checks.
        EmbeddingCache(config.embedding_layers, config.embedding_match, index=config.index)
        check_hook(config.embedding_hook, config)

    for dotted, setting_name in (
        *((level_name, "levels (--level)") for level_name in config.levels),
        (config.fusion_provider, "fusion_provider (--fusion-provider)"),
    ):
        if dotted is not None:
            import_object(dotted, setting_name)


def check_encoders(config: SemanticCacheConfig, hidden: Callable[[], int | None]) -> None:
    """Check encoders and the layers' dimensions, before the model is loaded.

    Parameters
    ----------
    hidden : Callable[[], int | None]
        Returns the width of the model's own embeddings, None if it is unknown. Called only where a
        layer has such vectors.

    Raises
    ------
    ConfigError
        A layer's dimension is not that of its encoder.
    MissingExtraError
        An encoder's package is not installed.
    ModelError
        An encoder is missing or damaged.
    """
    hook_layers = check_hook(config.embedding_hook, config) if config.embedding_layers else []
    encoders: dict[str, tuple[str, str]] = {}
    if config.semantic_text or "prompt" in hook_layers:
        encoders["prompt"] = config.index_encoder, "index_encoder"
    if "vision" in hook_layers and config.image_encoder is not None:
        encoders["vision"] = config.image_encoder, "image_encoder"

    widths = {
        layer: sentence_width(*encoder)
        for layer, encoder in encoders.items()
        if encoder[0] != "model"
    }
    # Reading the model's own width may fetch its configuration: only where a layer needs it.
    widths |= {layer: hidden() for layer in hook_layers if encoders.get(layer, ("",))[0] == "model"}

    for spec in map(LayerSpec.parse, config.embedding_layers):
        if spec.dim is not None and (width := widths.get(spec.name)) not in (None, spec.dim):
            raise ConfigError(spec.misfit(f"its vectors have {width} components", width))


def build_gate(config: SemanticCacheConfig) -> TrustGate | None:
    """Build the gate of the config's error bound; None without a bound or with a certificate.

    Its evidence stands in `own_folder`. Open the store first.

    Raises
    ------
    StoreError
        The folder cannot be used.
    """
    if not config.labels_online:
        return None
    folder = config.own_folder
    return TrustGate(
        config,
        ledger=EvidenceLedger(Path(folder).expanduser() if folder else None, fingerprint(config)),
    )


def build_levels(config: SemanticCacheConfig, engine: Any) -> list[Level]:
    """Build the levels in order of cost: exact text, latent, semantic text, then the user's own."""
    levels: list[Level] = []
    # The cheapest first: the finder stops at the first level with an accepted donor.
    if config.exact_text:
        levels.append(ExactTextCache())
    if config.embedding_layers:
        levels.append(
            EmbeddingCache(config.embedding_layers, config.embedding_match, index=config.index)
        )

    if config.semantic_text:
        embed = getattr(engine, "embed_text", None)
        epoch, threads = getattr(engine, "epoch", ""), config.encoder_threads
        encoder = text_encoder(
            config.index_encoder, embed=embed, fingerprint=epoch, threads=threads
        )
        window = config.chunk_window
        levels.append(
            SemanticTextCache(encoder, config.similarity_threshold, window, index=config.index)
        )

    levels += [
        make_from_factory(
            dotted, "levels (--level)", ("name", "status_names", "search", "add", "remove"), config
        )
        for dotted in config.levels
    ]
    return levels


def fingerprints_of(levels: list[Level]) -> dict[str, str]:
    """Return the fingerprint of each level's encoder; empty for a level without one."""
    return {level.name: getattr(level, "fingerprint", "") for level in levels}


def build_hook(config: SemanticCacheConfig, engine: Any) -> tuple[Embed, str]:
    """Return the function that gives a request's latent vectors, and its fingerprint."""
    if not config.embedding_layers:
        return no_vectors, ""
    hook = make_hook(config.embedding_hook, config, engine)
    return hook, hook.fingerprint


def build_fusion(config: SemanticCacheConfig, engine: Any) -> StoringObserver | None:
    """Build the observer that keeps states of fusion modules.

    The result is None without `fusion_provider`, or if `enable_fusion_cache` is False.
    """
    if config.fusion_provider is None or not config.enable_fusion_cache:
        return None
    return plugins.load(plugins.OBSERVERS, "fusion")(config, engine)


def build_guards(config: SemanticCacheConfig, levels: list[Level]) -> list[Guard]:
    """Build the guards in order: threshold, pictures, prompt around the chunk, words."""
    thresholds: dict[str, float] = {"exact_text": config.similarity_threshold}
    for level in levels:
        thresholds |= getattr(level, "thresholds", {})

    # Levels of the user's own vouch for their donors themselves: no score is too low.
    default = -1.0 if config.levels else None
    guards: list[Guard] = [ThresholdGuard(thresholds, default=default)]

    if config.media == "exact":
        guards.append(MediaGuard())
    elif config.media == "similar":
        guards.append(MediaGuard(thresholds["embedding:vision"]))

    guards.append(ContextGuard())
    if config.lexical_guard:
        guards.append(LexicalGuard())
    return guards
