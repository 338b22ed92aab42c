"""Pictures from files, safely: no path leaves its folder, and a file that is no picture says so."""

from io import BytesIO
from pathlib import Path

from dejakv.errors import DatasetError, InputError
from dejakv.request import Media

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 50_000_000
SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


def media_from_file(path: Path) -> Media:
    """Reads a picture. Raises InputError where the file is missing or not a picture."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the image {path.name}: {error.strerror}; check --image-root") from error
    return checked(data, path.name)


def checked(data: bytes, name: str) -> Media:
    """The bytes as a medium, after a look at the header. Raises InputError if they are no picture Pillow knows."""
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            image.verify()
    except Exception as error:  # a damaged file makes Pillow raise almost anything
        raise InputError(
            f"{name} is not a readable image ({type(error).__name__}): give a PNG, JPEG or WebP file"
        ) from error
    if width * height > MAX_PIXELS:
        raise InputError(f"{name} has {width} x {height} pixels: make it smaller than {MAX_PIXELS:,} pixels")
    return Media(data, "image", name)


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
