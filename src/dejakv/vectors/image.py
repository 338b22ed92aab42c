"""Image encoders: a CLIP sentence-transformers model, or the served model's own vision tower; and the pictures of a request."""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.datasets.files import by_id, inside, media_from_file
from dejakv.errors import ConfigError, DatasetError, InputError, MissingExtraError, ModelError
from dejakv.identity import epoch_of
from dejakv.pictures import DECODING, decoded
from dejakv.request import DEFAULT_PARTITION, Media
from dejakv.vectors.base import ImageEncoder, Vector, module_fingerprint, torch_threads, unit
from dejakv.vectors.text import load_sentence_transformer

ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")
ID_FIELDS = ("image_id", "imageId", "image")
CLIP = "sentence-transformers/clip-ViT-B-32"
_log = logging.getLogger(__name__)


class ClipEncoder:
    """A CLIP model of sentence-transformers (512 numbers for the default). Needs the extra `embed`."""

    def __init__(self, name_or_path: str = CLIP, *, device: str = "cpu") -> None:
        self.name = name_or_path
        self._model = load_sentence_transformer(name_or_path, device, "image_encoder")
        self.fingerprint = epoch_of({"kind": "clip", "weights": module_fingerprint(self._model), "pictures": DECODING})

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        picture = decoded(media)
        with torch_threads():
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
        # An engine of somebody else may have the older signature.
        self._partitioned = "partition" in inspect.signature(embed).parameters
        self.fingerprint = epoch_of({"kind": "vision tower, averaged", "model": fingerprint})

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        tower_output = self._embed(media, partition) if self._partitioned else self._embed(media)
        row = np.asarray(tower_output, dtype=np.float32)
        return unit(row, row.size, "the served model's vision tower")


def image_encoder(engine: Any = None, *, prefer_clip: bool = True, name: str | None = None) -> ImageEncoder:
    """CLIP if it can be loaded, the engine's tower otherwise; with `prefer_clip=False` the tower comes first. `name`: the folder
    or hub name of a CLIP model that is used and nothing else, or `model` for the tower alone.

    Raises ConfigError if none is available; ModelError for a named model that cannot be loaded.
    """
    if name is not None and name != "model":
        # A model that was named is used or an error: no silent change of what vectors mean.
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


def image_roots(*roots: str | Path | None, environ: Mapping[str, str] | None = None) -> list[Path]:
    """The folders to search: the given ones, then those named by the environment variables, in their fixed order.

    >>> image_roots("pictures", environ={"GQA_IMAGE_ROOT": "/data/gqa"})
    [PosixPath('pictures'), PosixPath('/data/gqa')]
    """
    environ = os.environ if environ is None else environ
    named = [*roots, *(environ.get(name) for name in ROOT_VARIABLES)]
    # Each once, in the order of first mention.
    return [Path(root) for root in dict.fromkeys(named) if root]


def pictures_of(sample: Any, roots: Iterable[Path]) -> tuple[Media, ...]:
    """The pictures of a `Request` (or data set `Sample`): its media, or the file of its image id under the roots.

    Empty if it has no picture. Raises InputError for an id whose file is missing, unreadable or outside the
    roots: the caller counts a skip.
    """
    media = tuple(item for item in getattr(sample, "media", ()) if item.modality == "image")
    if media:
        return media

    name = image_id(sample)
    if not name:
        return ()

    folders = list(roots)
    for root in folders:
        try:
            path = by_id(root, name)
            if path is None and Path(name).suffix:
                path = inside(root, name)
                path = path if path.is_file() else None
        except (
            DatasetError,
            ValueError,
            OSError,
        ) as error:  # a path that leaves the folder, or that no file system accepts
            raise InputError(f"the image id {name!r} names no file below the image root: {error}") from error
        if path is not None:
            return (media_from_file(path),)
    where = ", ".join(str(root) for root in folders) or "no folder: set image_root (--image-root), or " + " or ".join(
        ROOT_VARIABLES
    )
    raise InputError(f"no picture {name}.jpg or .png in {where}")


def image_id(sample: Any) -> str:
    """The id by which a `Request` or a data set's `Sample` names its picture; empty for none.

    >>> from dejakv import Request
    >>> image_id(Request("r", "Where?", "Where?", metadata={"imageId": 42}))
    '42'
    """
    fields: Mapping[str, Any] = getattr(sample, "metadata", None) or getattr(sample, "fields", None) or {}
    for name in ID_FIELDS:
        value = fields.get(name)
        if isinstance(value, str | int) and str(value):
            return str(value)
    return ""
