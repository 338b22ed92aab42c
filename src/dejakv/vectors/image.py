"""Image encoders (CLIP, or the served model's vision tower), and the pictures of a request."""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.errors import ConfigError, DatasetError, InputError, MissingExtraError, ModelError
from dejakv.identity import epoch_of
from dejakv.pictures import DECODING, by_id, decode_picture, inside, media_from_file
from dejakv.request import DEFAULT_PARTITION, Media
from dejakv.vectors.base import ImageEncoder, Vector, module_fingerprint, torch_threads, unit_vector
from dejakv.vectors.text import load_sentence_transformer

ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")
ID_FIELDS = ("image_id", "imageId", "image")
CLIP = "sentence-transformers/clip-ViT-B-32"
_log = logging.getLogger(__name__)


class ClipEncoder:
    """CLIP model of sentence-transformers (512 components by default). Needs the extra `embed`.

    Raises
    ------
    MissingExtraError
        If sentence-transformers is not installed.
    ModelError
        If the model cannot be loaded.
    """

    def __init__(self, name_or_path: str = CLIP, *, device: str = "cpu") -> None:
        self.name = name_or_path
        self._model = load_sentence_transformer(name_or_path, device, "image_encoder")
        self.fingerprint = epoch_of(
            {"kind": "clip", "weights": module_fingerprint(self._model), "pictures": DECODING}
        )

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        """Encode a picture as a unit vector. Nothing is remembered, in any partition."""
        picture = decode_picture(media)
        with torch_threads():
            row: Any = self._model.encode(
                [picture], normalize_embeddings=True, show_progress_bar=False
            )[0]

        return unit_vector(row, len(row), f"the encoder {self.name!r}")


class TowerEncoder:
    """Encoder by the served model's own vision tower, whose output is averaged.

    It needs no download. The model needs the tower's output anyway, so with a registry of encoder
    outputs it is computed only once.

    Parameters
    ----------
    embed : Callable
        `engine.embed_image`: takes media (and the partition, if it has such a parameter) and
        returns `[hidden]`.
    fingerprint : str
        Fingerprint of the served model (`engine.epoch`).
    """

    def __init__(self, embed: Callable[..., Any], fingerprint: str) -> None:
        self._embed = embed
        # An engine of somebody else may have the older signature.
        self._partitioned = "partition" in inspect.signature(embed).parameters
        self.fingerprint = epoch_of({"kind": "vision tower, averaged", "model": fingerprint})

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        """Encode a picture as a unit vector; the tower's output is shared within the partition."""
        tower_output = self._embed(media, partition) if self._partitioned else self._embed(media)
        row = np.asarray(tower_output, dtype=np.float32)
        return unit_vector(row, row.size, "the served model's vision tower")


def image_encoder(
    engine: Any = None, *, prefer_clip: bool = True, name: str | None = None
) -> ImageEncoder:
    """Choose the image encoder: CLIP if it can be loaded, and the engine's tower otherwise.

    Parameters
    ----------
    engine : Any
        Engine whose `embed_image` is the tower, if it has one.
    prefer_clip : bool
        False: the tower comes first.
    name : str, optional
        Folder or hub name of a CLIP model that is used and nothing else, or `model` for the tower
        alone.

    Raises
    ------
    ConfigError
        If no encoder is available.
    MissingExtraError, ModelError
        If a model is named, and sentence-transformers is missing or the model cannot be loaded.
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
            'image_encoder="model" (--image-encoder): the served model has no vision tower; name '
            "a CLIP model or its folder"
        )

    try:
        return ClipEncoder()
    except (MissingExtraError, ModelError) as error:
        if tower is None:
            raise ConfigError(
                f"the vision layer has no encoder: {error}; or use a model with a vision tower, "
                "or name your own hook "
                "in embedding_hook (--embedding-hook) as package.module:factory"
            ) from error
        _log.warning(
            "CLIP cannot be loaded, the vision layer uses the served model's tower: %s", error
        )
        return tower


def image_roots(*roots: str | Path | None, environ: Mapping[str, str] | None = None) -> list[Path]:
    """List the folders in which pictures are searched.

    Parameters
    ----------
    roots : str, Path or None
        Folders that come first; None is left out.
    environ : Mapping[str, str], optional
        Variables that name the other folders, in the order of `ROOT_VARIABLES`; by default the
        process's environment.

    Examples
    --------
    >>> image_roots("pictures", environ={"GQA_IMAGE_ROOT": "/data/gqa"})
    [PosixPath('pictures'), PosixPath('/data/gqa')]
    """
    environ = os.environ if environ is None else environ
    named = [*roots, *(environ.get(name) for name in ROOT_VARIABLES)]
    # Each once, in the order of first mention.
    return [Path(root) for root in dict.fromkeys(named) if root]


def pictures_of(sample: Any, roots: Iterable[Path]) -> tuple[Media, ...]:
    """Return the pictures of a `Request` or data set `Sample`.

    Parameters
    ----------
    sample : Request or Sample
        Its media are the pictures; without media, the file of its image id is.
    roots : Iterable[Path]
        Folders in which that file is searched.

    Returns
    -------
    tuple[Media, ...]
        The pictures; empty if there is none.

    Raises
    ------
    InputError
        If the file of an image id is missing, unreadable or outside of the folders. The caller
        counts a skip.
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
        ) as error:
            # A path that leaves the folder, or that no file system accepts.
            raise InputError(
                f"the image id {name!r} names no file below the image root: {error}"
            ) from error

        if path is not None:
            return (media_from_file(path),)

    where = ", ".join(
        str(root) for root in folders
    ) or "no folder: set image_root (--image-root), or " + " or ".join(ROOT_VARIABLES)
    raise InputError(f"no picture {name}.jpg or .png in {where}")


def image_id(sample: Any) -> str:
    """Return the id by which a `Request` or data set `Sample` names its picture; empty for none.

    Examples
    --------
    >>> from dejakv import Request
    >>> image_id(Request("r", "Where?", "Where?", metadata={"imageId": 42}))
    '42'
    """
    fields: Mapping[str, Any] = (
        getattr(sample, "metadata", None) or getattr(sample, "fields", None) or {}
    )
    for name in ID_FIELDS:
        value = fields.get(name)
        if isinstance(value, str | int) and str(value):
            return str(value)

    return ""
