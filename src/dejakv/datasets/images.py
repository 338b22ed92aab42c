"""Pictures from files, safely: no path leaves its folder, and a file that is not a picture is an error."""

from pathlib import Path

from dejakv.errors import DatasetError, InputError
from dejakv.pictures import checked
from dejakv.request import Media

SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


def media_from_file(path: Path) -> Media:
    """Reads a picture. Raises InputError where the file is missing or not a picture."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the image {path.name}: {error.strerror}; check --image-root") from error
    return checked(data, path.name)[0]


def inside(root: Path, name: str) -> Path:
    """`root / name`, or DatasetError if that lies outside of `root`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DatasetError(f"the image path {name!r} leaves the folder {str(root)!r}: give paths below --image-root")
    return path


def by_id(root: Path, image_id: str) -> Path | None:
    """The picture `<image_id>.jpg|.png|...` below `root`, None if there is none."""
    for suffix in SUFFIXES:
        path = inside(root, image_id + suffix)
        if path.is_file():
            return path
    return None
