"""Pictures as bytes from strangers: their header is judged before anything is decoded.

There is one way to decode them, for all engines. Pillow is loaded when the first picture comes.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejakv.errors import DatasetError, InputError
from dejakv.request import Media

if TYPE_CHECKING:
    from PIL.Image import Image

DECODING = "turned as EXIF says"
"""How a file becomes pixels. A part of the epoch, since other pixels give other state."""
FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


MAX_PIXELS = 50_000_000
"""Largest width times height, and largest cost of decoding in pixels."""
MAX_SIDE = 32_768
MAX_RATIO = 100
"""Largest ratio of the longer side to the shorter.

Processors that scale the shorter side to a fixed length blow up a strip.
"""

MAX_SCANS = 100
"""Most passes over a JPEG's coefficients; encoders write up to 10 or so."""
MAX_SEGMENTS = 10_000
"""Most parts of a JPEG that are walked through to count its scans."""

_SCAN, _END, _ARITHMETIC = 0xDA, 0xD9, (0xC9, 0xCA, 0xCB)
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
"""The next marker of a JPEG that begins a segment or ends the picture (ITU-T T.81, B.1.1)."""

before_decoding: ContextVar[Callable[[], None] | None] = ContextVar("before_decoding", default=None)
"""Called before a picture is decoded. It may raise, to decode nothing for a client that left."""


def check_picture(data: bytes, name: str) -> tuple[Media, int]:
    """Check a picture's header and checksums, and decode nothing.

    Returns
    -------
    tuple[Media, int]
        The bytes as a medium, and the picture's pixels: width by height, or as many as take as long
        to decode.

    Raises
    ------
    InputError
        The bytes are no still PNG, JPEG or WebP picture, or it is too large.
    """
    with _open_image(data, name) as image:
        pixels = max(image.width * image.height, _decode_cost(image, data))
        try:
            # Checksums alone; a damaged picture is refused before a request waits in the queue.
            image.verify()
        # A damaged file makes Pillow raise almost anything.
        except Exception as error:
            raise _unreadable(name, error) from error
    return Media(data, "image", name), pixels


def media_from_file(path: Path) -> Media:
    """Read a picture from a file.

    Raises
    ------
    InputError
        The file cannot be read, or see `check_picture`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the image {path.name}: {error.strerror}; check --image-root"
        ) from error
    return check_picture(data, path.name)[0]


def inside(root: Path, name: str) -> Path:
    """Return the real path of `root / name`.

    Raises
    ------
    DatasetError
        The path lies outside of `root`.
    """
    # Resolved first: neither `..` nor a link leads out of the folder.
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DatasetError(
            f"the image path {name!r} leaves the folder {str(root)!r}: give paths below"
            " --image-root"
        )
    return path


def by_id(root: Path, image_id: str) -> Path | None:
    """Return the picture `<image_id>.jpg|.png|...` below `root`, None if there is none.

    Raises
    ------
    DatasetError
        See `inside`.
    """
    return next(
        (path for suffix in SUFFIXES if (path := inside(root, image_id + suffix)).is_file()), None
    )


def decode_picture(media: Media) -> "Image":
    """Decode a picture to RGB, turned as its EXIF data says, like transformers' `load_image`.

    Raises
    ------
    InputError
        See `check_picture`; also for a truncated picture, and for a sound or clip.
    """
    from PIL import ImageOps

    name = media.name or f"picture {media.digest[:12]}"
    if media.modality != "image":
        raise InputError(
            f"{name}: {media.modality} is not supported here, give pictures (PNG, JPEG or WebP)"
        )

    with _open_image(media.data, name) as image:
        if (ask := before_decoding.get()) is not None:
            ask()
        try:
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error


def _open_image(data: bytes, name: str) -> Any:
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise _unreadable(name, error) from error
    # Pillow reads the header alone until pixels are asked for.
    problem = _problem(image, data)
    if problem:
        image.close()
        raise InputError(f"{name} {problem}")
    return image


def _problem(image: Any, data: bytes) -> str:
    """Return what is wrong with a picture's header, and the remedy; empty if nothing is."""
    width, height = image.size
    size = f"has {width} x {height} pixels: make"
    if width * height > MAX_PIXELS:
        return f"{size} it smaller than {MAX_PIXELS:,} pixels"
    if max(width, height) > MAX_SIDE:
        return f"{size} the longer side shorter than {MAX_SIDE:,} pixels"
    if max(width, height) > MAX_RATIO * min(width, height):
        return f"{size} the longer side at most {MAX_RATIO} times the shorter one"

    animated = image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False)
    if animated:
        return "is animated: give one frame as a picture"
    if _is_jpeg(image) and (slow := _count_scans(data)[1]):
        return f"{slow}: save it again as a baseline JPEG"
    if (work := _decode_cost(image, data)) > MAX_PIXELS:
        return (
            f"takes as long to decode as {work:,} pixels, the limit is {MAX_PIXELS:,}: make it "
            "smaller, or save it as a baseline JPEG"
        )
    return ""


def _is_jpeg(image: Any) -> bool:
    # Not `== "JPEG"`: phones' pictures in several parts are of format MPO.
    return image.format not in ("PNG", "WEBP")


def _decode_cost(image: Any, data: bytes) -> int:
    """Estimate the time to decode a picture, in pixels of 20 ns.

    The limit is the time of `MAX_PIXELS`, a second, since decoding cannot be interrupted. The
    factors are rounded up from measurements on one core with noise, flat pictures and each mode.
    """
    pixels, size = image.width * image.height, len(data)
    if image.format == "PNG":
        deep = image.tile and "16" in str(image.tile[0][3])
        samples = len(image.getbands()) * (2 if deep else 1)
        passes = 1.25 if image.info.get("interlace") else 1.0
        return int(pixels * (1 + samples) / 6 * passes + size / 4)
    # `VP8 ` marks lossy coding, whose bytes take longer to decode.
    if image.format == "WEBP":
        return int(pixels * 0.75 + size * (5 if b"VP8 " in data else 1))
    return int(pixels * (0.5 + _count_scans(data)[0] / 10) + size)


def _count_scans(data: bytes) -> tuple[int, str]:
    """Count the scans of a JPEG up to its end, and say what is wrong with them; decode nothing.

    Each scan passes over all pixels, however few bytes it has, and arithmetic coding makes pixels
    out of no bytes at all.
    """
    scans, place = 0, 0
    # Bounded: a crafted file can have a marker in every few bytes.
    for _ in range(MAX_SEGMENTS):
        marker = _MARKER.search(data, place)
        kind = data[marker.end() - 1] if marker else _END
        if marker is None or kind == _END:
            too_many = f"has {scans} scans, the limit is {MAX_SCANS}"
            return scans, too_many if scans > MAX_SCANS else ""
        if kind in _ARITHMETIC:
            return scans, "has arithmetic coding"
        scans += kind == _SCAN
        # The marker that begins the picture has no length.
        length = 0 if kind == 0xD8 else int.from_bytes(data[marker.end() : marker.end() + 2])
        place = marker.end() + length

    return scans, f"has more than {MAX_SEGMENTS:,} segments"


def _unreadable(name: str, error: Exception) -> InputError:
    return InputError(
        f"{name} is not a readable image ({type(error).__name__}): give a complete PNG, JPEG or "
        "WebP file"
    )
