"""The pictures of a request: its own media, or a file named by its image id."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dejakv.datasets.images import by_id, inside, media_from_file
from dejakv.errors import DatasetError, InputError
from dejakv.request import Media

ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")
ID_FIELDS = ("image_id", "imageId", "image")


def image_roots(*roots: str | Path | None, environ: Mapping[str, str] | None = None) -> list[Path]:
    """The folders to search: the given ones, then those named by the environment variables, in their fixed order."""
    environ = os.environ if environ is None else environ
    named = [*roots, *(environ.get(name) for name in ROOT_VARIABLES)]
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
    """The id by which a `Request` or a data set's `Sample` names its picture; empty for none."""
    fields: Mapping[str, Any] = getattr(sample, "metadata", None) or getattr(sample, "fields", None) or {}
    for name in ID_FIELDS:
        value = fields.get(name)
        if isinstance(value, str | int) and str(value):
            return str(value)
    return ""
