"""Embedding hooks: the source of the latent layers' vectors.

A hook is called with `llm=` (the engine) and `sample=` (the `Request`, with the data set's fields in `metadata`) and
returns `{layer: 1-D array}`. `--embedding-hook` names a built-in one or `package.module:factory`; the factory takes no
arguments and returns a hook, or is itself a function with the parameters `llm` and `sample`.
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.config import SemanticCacheConfig
from dejakv.dotted import made_by, named
from dejakv.errors import ConfigError
from dejakv.identity import epoch_of
from dejakv.request import DEFAULT_PARTITION, Request
from dejakv.vectors.base import ImageEncoder, TextEncoder, Vector, unit
from dejakv.vectors.image import image_encoder, image_roots, pictures_of
from dejakv.vectors.spaces import LayerSpec
from dejakv.vectors.text import text_encoder, varying_part

Hook = Callable[..., Mapping[str, Any]]
BUILT_IN = ("none", "prompt", "vision", "prompt_vision")


class EmbeddingHook:
    """A hook as the cache calls it: a vector that cannot be computed is a counted skip, never an error of the request.

    fingerprint  of everything that the vectors depend on
    counts       of `ok` (by layer) and `skip <reason>` (a picture is missing, the hook raised, ...)
    last_error   message of the last skip
    """

    def __init__(self, hook: Hook, engine: Any, fingerprint: str) -> None:
        self._hook = hook
        self._engine = engine
        self.fingerprint = fingerprint
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> dict[str, Vector]:
        """The vectors of a request by layer; a layer that could not be computed is absent. Raises ConfigError only."""
        vectors: dict[str, Vector] = {}
        try:
            found = self._hook(llm=self._engine, sample=request)
            for name, row in found.items():
                if isinstance(row, Exception):
                    self._skip(name, row)
                elif row is not None:
                    vectors[name] = np.asarray(_numpy(row), dtype=np.float32)
        except ConfigError:
            raise
        except Exception as error:  # a hook is foreign code: any error costs this request its latent layers
            self._skip("hook", error)
            return {}
        with self._lock:
            self.counts.update(f"{name}: ok" for name in vectors)
        return vectors

    def _skip(self, name: str, error: Exception) -> None:
        with self._lock:
            self.counts[f"{name}: skip ({type(error).__name__})"] += 1
            self.last_error = f"{name}: {error}"


class PromptHook:
    """Layer `prompt`: the varying part of the chunk, by a text encoder."""

    def __init__(self, encoder: TextEncoder, window: int = 0) -> None:
        self.encoder = encoder
        self.window = window
        self.fingerprint = epoch_of({"prompt": encoder.fingerprint, "window": window})

    def __call__(self, *, llm: Any, sample: Any) -> dict[str, Any]:
        text = getattr(sample, "chunk", None) or getattr(sample, "question", "")
        return {"prompt": self.encoder.encode(varying_part(text, self.window))}


class VisionHook:
    """Layer `vision`: the request's picture, by an image encoder; the mean direction of several pictures.

    A request without any picture has no such vector; a picture that is missing or unreadable raises InputError.
    """

    def __init__(self, encoder: ImageEncoder, roots: list[Path]) -> None:
        self.encoder = encoder
        self.roots = roots
        self.fingerprint = epoch_of({"vision": encoder.fingerprint})

    def __call__(self, *, llm: Any, sample: Any) -> dict[str, Any]:
        pictures = pictures_of(sample, self.roots)
        if not pictures:
            return {}
        partition = getattr(sample, "partition", DEFAULT_PARTITION)
        rows = [self.encoder.encode(picture, partition) for picture in pictures]
        return {"vision": rows[0] if len(rows) == 1 else unit(np.mean(rows, axis=0), len(rows[0]), "the vision layer")}


class JoinedHook:
    """Several hooks as one. If one fails, its layer has the error, and the others have their vectors."""

    def __init__(self, **hooks: Any) -> None:
        self.hooks = hooks
        self.fingerprint = epoch_of({name: hook.fingerprint for name, hook in hooks.items()})

    def __call__(self, *, llm: Any, sample: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, hook in self.hooks.items():
            try:
                found.update(hook(llm=llm, sample=sample))
            except ConfigError:
                raise
            except Exception as error:  # a failing layer does not affect the others
                found[name] = error
        return found


def hook_named(name: str, config: SemanticCacheConfig, engine: Any = None) -> EmbeddingHook:
    """The hook that `--embedding-hook` names, ready for `HierarchicalCache(embed=...)`.

    `prompt` uses the encoder of `--index-encoder`. `vision` uses CLIP if it can be loaded and the engine's own tower
    otherwise; for a layer of dimension `auto` the tower comes first. Raises ConfigError for an unknown name, a dotted path
    that does not import, or layers that the hook does not provide.
    """
    specs = {spec.name: spec for spec in map(LayerSpec.parse, config.embedding_layers)}
    if ":" in name:
        return _foreign(name, engine)
    if name not in BUILT_IN:
        raise ConfigError(
            f"embedding_hook {name!r} (--embedding-hook) is unknown: choose one of {', '.join(BUILT_IN)}, or give package.module:factory"
        )
    made = [] if name == "none" else name.split("_")
    missing = [layer for layer in specs if layer not in made]
    if missing:
        raise ConfigError(
            f"the layer {missing[0]!r} has no vectors: embedding_hook={name} (--embedding-hook) provides {', '.join(made) or 'none'}; "
            "choose another hook, or drop the layer from embedding_layers (--embedding-layer)"
        )
    hooks: dict[str, Any] = {}
    if "prompt" in made:
        embed = getattr(engine, "embed_text", None)
        encoder = text_encoder(config.index_encoder, embed=embed, fingerprint=_epoch(engine))
        hooks["prompt"] = PromptHook(encoder, config.chunk_window)
    if "vision" in made:
        automatic = "vision" in specs and specs["vision"].dim is None
        encoder = image_encoder(engine, prefer_clip=not automatic, name=config.image_encoder)
        hooks["vision"] = VisionHook(encoder, image_roots(config.image_root))
    joined = JoinedHook(**hooks)
    return EmbeddingHook(joined, engine, joined.fingerprint)


def _foreign(name: str, engine: Any) -> EmbeddingHook:
    made = named(name, "embedding_hook (--embedding-hook)")
    try:
        takes = inspect.signature(made).parameters
    except (TypeError, ValueError):
        takes = {}
    is_hook = {"llm", "sample"} <= set(takes)
    hook: Any = made if is_hook else made_by(name, "embedding_hook (--embedding-hook)", ("__call__",))
    called: Hook = hook
    fingerprint = getattr(hook, "fingerprint", None)
    return EmbeddingHook(
        called, engine, epoch_of({"hook": name, "own": str(fingerprint or ""), "engine": _epoch(engine)})
    )


def _epoch(engine: Any) -> str:
    return str(getattr(engine, "epoch", ""))


def _numpy(row: Any) -> Any:
    """Torch tensors of any device, as arrays."""
    return row.detach().float().cpu().numpy() if hasattr(row, "detach") else row
