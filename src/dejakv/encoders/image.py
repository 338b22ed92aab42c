"""Image encoders: a CLIP sentence-transformers model, or the served model's own vision tower."""

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dejakv.encoders.base import ImageEncoder, Vector
from dejakv.encoders.fingerprint import module_fingerprint
from dejakv.encoders.text import load_sentence_transformer
from dejakv.encoders.threads import torch_threads
from dejakv.errors import ConfigError, MissingExtraError, ModelError
from dejakv.identity import epoch_of
from dejakv.index.base import unit
from dejakv.pictures import decoded
from dejakv.request import DEFAULT_PARTITION, Media

CLIP = "sentence-transformers/clip-ViT-B-32"
_log = logging.getLogger(__name__)


class ClipEncoder:
    """A CLIP model of sentence-transformers (512 numbers for the default). Needs the extra `embed`."""

    def __init__(self, name_or_path: str = CLIP, *, device: str = "cpu") -> None:
        self.name = name_or_path
        self._model = load_sentence_transformer(name_or_path, device, "image_encoder")
        self._lock = threading.Lock()
        self.fingerprint = epoch_of({"kind": "clip", "weights": module_fingerprint(self._model)})

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        picture = decoded(media)
        with self._lock, torch_threads():
            row: Any = self._model.encode([picture], normalize_embeddings=True, show_progress_bar=False)[0]
        return unit(row, len(row), f"the encoder {self.name!r}")


class TowerEncoder:
    """The served model's own vision tower, averaged: no download, and the model needs its output anyway, so with a
    registry of encoder outputs it is computed only once.

    embed        `engine.embed_image`: media (and partition, if it takes one) -> `[hidden]`
    fingerprint  of the served model (`engine.epoch`)
    """

    def __init__(self, embed: Callable[..., Any], fingerprint: str) -> None:
        self._embed = embed
        self._partitioned = "partition" in inspect.signature(embed).parameters
        self.fingerprint = epoch_of({"kind": "vision tower, averaged", "model": fingerprint})

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        given = self._embed(media, partition) if self._partitioned else self._embed(media)
        row = np.asarray(given, dtype=np.float32)
        return unit(row, row.size, "the served model's vision tower")


def image_encoder(engine: Any = None, *, prefer_clip: bool = True, name: str | None = None) -> ImageEncoder:
    """CLIP if it can be loaded, the engine's tower otherwise; with `prefer_clip=False` the tower comes first. `name`: the folder
    or hub name of a CLIP model that is used and nothing else, or `model` for the tower alone.

    Raises ConfigError if none is available; ModelError for a named model that cannot be loaded.
    """
    if name is not None and name != "model":
        return ClipEncoder(name)
    embed = getattr(engine, "embed_image", None)
    tower = TowerEncoder(embed, str(getattr(engine, "epoch", ""))) if embed is not None else None
    if tower is not None and (name == "model" or not prefer_clip):
        return tower
    if name == "model":
        raise ConfigError(
            'image_encoder="model" (--image-encoder): the served model has no vision tower; name a CLIP model or its folder'
        )
    try:
        return ClipEncoder()
    except (MissingExtraError, ModelError) as error:
        if tower is None:
            raise ConfigError(
                f"the vision layer has no encoder: {error}; or use a model with a vision tower, or name your own hook "
                "in embedding_hook (--embedding-hook) as package.module:factory"
            ) from error
        _log.warning("CLIP cannot be loaded, the vision layer uses the served model's tower: %s", error)
        return tower
