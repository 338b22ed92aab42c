"""Embedding hooks: the source of the latent layers' vectors.

A hook is called with `llm=` (the engine) and `sample=` (the `Request`, with the data set's fields
in `metadata`) and returns `{layer: 1-D array}`. `--embedding-hook` names a built-in one or
`package.module:factory`. The factory takes no arguments and returns a hook, or is itself a
function with the parameters `llm` and `sample`.
"""

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.identity import epoch_of
from dejakv.request import Request
from dejakv.settings import import_object, make_from_factory
from dejakv.vectors.base import ImageEncoder, TextEncoder, Vector, unit_vector
from dejakv.vectors.image import image_encoder, image_roots, pictures_of
from dejakv.vectors.spaces import LayerSpec
from dejakv.vectors.text import text_encoder, varying_part

logger = logging.getLogger(__name__)

Hook = Callable[..., Mapping[str, Any]]
_FLAG = "embedding_hook (--embedding-hook)"
BUILT_IN = ("none", "prompt", "vision", "prompt_vision")


class EmbeddingHook:
    """Hooks as the cache calls them: an error of a hook is a counted skip of its layers.

    Parameters
    ----------
    hooks : Mapping[str, Hook]
        The hooks, by the name under which a failure is counted. A failed hook does not affect the
        vectors of the others.
    engine : Any
        The engine, which is passed to the hooks as `llm`.
    fingerprint : str
        Digest of everything that the vectors depend on.

    Attributes
    ----------
    counts : Counter[str]
        Numbers of `NAME: ok` (by layer) and of `NAME: skip (REASON)` (by hook).
    """

    def __init__(self, hooks: Mapping[str, Hook], engine: Any, fingerprint: str) -> None:
        self._hooks = hooks
        self._engine = engine
        self.fingerprint = fingerprint
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> dict[str, Vector]:
        """Compute the vectors of a request, by layer. A layer that could not be computed is absent.

        Raises
        ------
        ConfigError
            If a hook raises it. Every other error is counted.
        """
        vectors: dict[str, Vector] = {}
        for name, hook in self._hooks.items():
            try:
                raw_vectors = hook(llm=self._engine, sample=request)
                hook_vectors = {
                    layer: np.asarray(_numpy(row), np.float32)
                    for layer, row in raw_vectors.items()
                    if row is not None
                }
            except ConfigError:
                raise
            except Exception as error:
                # A hook is foreign code: any error costs this request its layers.
                logger.debug("the embedding hook %s failed", name, exc_info=True)
                hook_vectors: dict[str, Vector] = {}
                self._count(f"{name}: skip ({type(error).__name__})")

            vectors |= hook_vectors

        self._count(*(f"{name}: ok" for name in vectors))
        return vectors

    def _count(self, *outcomes: str) -> None:
        with self._lock:
            self.counts.update(outcomes)


def prompt_hook(encoder: TextEncoder, window: int = 0) -> Hook:
    """Make the hook of the layer `prompt`: the varying part of the chunk, by a text encoder.

    Parameters
    ----------
    encoder : TextEncoder
        Encoder of the chunk.
    window : int
        Maximum characters of the chunk; 0 takes all.
    """

    def hook(*, llm: Any, sample: Any) -> dict[str, Any]:
        return {"prompt": encoder.encode(varying_part(sample.chunk, window))}

    return hook


def vision_hook(encoder: ImageEncoder, roots: list[Path]) -> Hook:
    """Make the hook of the layer `vision`: the mean direction of the request's pictures.

    A request without any picture has no such vector. For a picture that is missing or unreadable
    the hook raises InputError.

    Parameters
    ----------
    encoder : ImageEncoder
        Encoder of the pictures.
    roots : list[Path]
        Folders in which pictures are searched by their ids.
    """

    def hook(*, llm: Any, sample: Any) -> dict[str, Any]:
        # Within the partition: who saw a picture first could be told by the time it takes.
        rows = [encoder.encode(picture, sample.partition) for picture in pictures_of(sample, roots)]
        if not rows:
            return {}
        return {
            "vision": rows[0]
            if len(rows) == 1
            else unit_vector(np.mean(rows, axis=0), len(rows[0]), "the vision layer")
        }

    return hook


def check_hook(name: str, config: SemanticCacheConfig) -> list[str]:
    """Return the layers that a built-in hook provides; none of a foreign hook.

    Raises
    ------
    ConfigError
        For an unknown name, a dotted path that does not import, or layers that a built-in hook does
        not provide.
    """
    if ":" in name:
        import_object(name, _FLAG)
        return []
    if name not in BUILT_IN:
        raise ConfigError(
            f"embedding_hook {name!r} (--embedding-hook) is unknown: choose one of "
            f"{', '.join(BUILT_IN)}, or give package.module:factory"
        )

    made: list[str] = [] if name == "none" else [*name.split("_")]
    layers = [LayerSpec.parse(text).name for text in config.embedding_layers]
    missing = [layer for layer in layers if layer not in made]
    if missing:
        raise ConfigError(
            f"the layer {missing[0]!r} has no vectors: embedding_hook={name} (--embedding-hook) "
            f"provides {', '.join(made) or 'none'}; "
            "choose another hook, or drop the layer from embedding_layers (--embedding-layer)"
        )

    return made


def make_hook(name: str, config: SemanticCacheConfig, engine: Any = None) -> EmbeddingHook:
    """Make the hook that `--embedding-hook` names, for `HierarchicalCache(embed=...)`.

    `prompt` uses the encoder of `--index-encoder`. `vision` uses CLIP if it can be loaded and the
    engine's own tower otherwise; for a layer of dimension `auto` the tower comes first.

    Raises
    ------
    ConfigError
        For an unknown name, a dotted path that does not import, layers that the hook does not
        provide, and a vision layer without an encoder.
    MissingExtraError, ModelError
        If a named encoder is not installed or cannot be loaded.
    """
    layers = check_hook(name, config)
    if ":" in name:
        return _foreign(name, engine)
    specs = {spec.name: spec for spec in map(LayerSpec.parse, config.embedding_layers)}

    hooks: dict[str, Hook] = {}
    depends: dict[str, Any] = {}
    if "prompt" in layers:
        embed = getattr(engine, "embed_text", None)
        encoder = text_encoder(config.index_encoder, embed=embed, fingerprint=_epoch(engine))
        hooks["prompt"] = prompt_hook(encoder, config.chunk_window)
        depends |= {"prompt": encoder.fingerprint, "window": config.chunk_window}

    if "vision" in layers:
        # The tower is loaded anyway, and any dimension will do.
        automatic = "vision" in specs and specs["vision"].dim is None
        encoder = image_encoder(engine, prefer_clip=not automatic, name=config.image_encoder)
        hooks["vision"] = vision_hook(encoder, image_roots(config.image_root))
        depends |= {"vision": encoder.fingerprint}

    return EmbeddingHook(hooks, engine, epoch_of(depends))


def _foreign(name: str, engine: Any) -> EmbeddingHook:
    hook: Any = import_object(name, _FLAG)
    try:
        is_hook = {"llm", "sample"} <= set(inspect.signature(hook).parameters)
    except (TypeError, ValueError):
        is_hook = False

    if not is_hook:
        hook = make_from_factory(name, _FLAG, ("__call__",))
    fingerprint = str(getattr(hook, "fingerprint", None) or "")
    return EmbeddingHook(
        {"hook": hook},
        engine,
        epoch_of({"hook": name, "own": fingerprint, "engine": _epoch(engine)}),
    )


def _epoch(engine: Any) -> str:
    return str(getattr(engine, "epoch", ""))


def _numpy(row: Any) -> Any:
    """Convert a torch tensor of any device to an array; return other values as they are."""
    return row.detach().float().cpu().numpy() if hasattr(row, "detach") else row
