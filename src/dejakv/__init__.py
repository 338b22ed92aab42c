"""DejaKV: reuse what a language model already computed for a similar prompt.

It also proves what that saved and cost.

Importing the package loads neither torch nor an engine; public names resolve on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejakv.attachment import attach as attach
    from dejakv.blend.prune import PrunableDynamicCache as PrunableDynamicCache
    from dejakv.build import build_cache as build_cache
    from dejakv.cache import HierarchicalCache as HierarchicalCache
    from dejakv.config import SemanticCacheConfig as SemanticCacheConfig
    from dejakv.decide.levels.exact import ExactTextCache as ExactTextCache
    from dejakv.decide.levels.latent import EmbeddingCache as EmbeddingCache
    from dejakv.decide.levels.semantic import SemanticTextCache as SemanticTextCache
    from dejakv.decide.part_order import SeenPrompts as SeenPrompts
    from dejakv.decide.part_order import arrange as arrange
    from dejakv.encoder_cache import VisualEmbeddingBlock as VisualEmbeddingBlock
    from dejakv.encoder_cache import VisualKVCache as VisualKVCache
    from dejakv.engines.transformers import TransformersEngine as TransformersEngine
    from dejakv.errors import DejaKVError as DejaKVError
    from dejakv.pipeline import Pipeline as Pipeline
    from dejakv.prototypes.fusion import FusionCache as FusionCache
    from dejakv.prototypes.fusion import FusionProvider as FusionProvider
    from dejakv.prototypes.fusion import FusionState as FusionState
    from dejakv.prototypes.lsh import LSHIndex as LSHIndex
    from dejakv.prototypes.token_store import LRUCacheStore as LRUCacheStore
    from dejakv.request import Media as Media
    from dejakv.request import Request as Request
    from dejakv.request import Sampling as Sampling
    from dejakv.store.open import open_store as open_store

__version__ = "0.2.0"

_HOMES = {
    "arrange": "dejakv.decide.part_order",
    "attach": "dejakv.attachment",
    "build_cache": "dejakv.build",
    "DejaKVError": "dejakv.errors",
    "EmbeddingCache": "dejakv.decide.levels.latent",
    "ExactTextCache": "dejakv.decide.levels.exact",
    "FusionCache": "dejakv.prototypes.fusion",
    "FusionProvider": "dejakv.prototypes.fusion",
    "FusionState": "dejakv.prototypes.fusion",
    "HierarchicalCache": "dejakv.cache",
    "LRUCacheStore": "dejakv.prototypes.token_store",
    "LSHIndex": "dejakv.prototypes.lsh",
    "Media": "dejakv.request",
    "Pipeline": "dejakv.pipeline",
    "PrunableDynamicCache": "dejakv.blend.prune",
    "Request": "dejakv.request",
    "Sampling": "dejakv.request",
    "SeenPrompts": "dejakv.decide.part_order",
    "SemanticCacheConfig": "dejakv.config",
    "SemanticTextCache": "dejakv.decide.levels.semantic",
    "TransformersEngine": "dejakv.engines.transformers",
    "VisualEmbeddingBlock": "dejakv.encoder_cache",
    "VisualKVCache": "dejakv.encoder_cache",
    "open_store": "dejakv.store.open",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dejakv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
