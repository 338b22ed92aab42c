"""Pictures as bytes from strangers: their header is judged before anything is decoded, and there is one way to decode them.

Knows no engine. Pillow is loaded when the first picture comes.
"""

from collections.abc import Callable
from contextvars import ContextVar
from io import BytesIO
from typing import TYPE_CHECKING, Any

from dejakv.errors import InputError
from dejakv.request import Media

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")


MAX_PIXELS = 50_000_000
"""Width times height, the cost of decoding."""
MAX_SIDE = 32_768
MAX_RATIO = 100
"""The longer side by the shorter: processors that scale the shorter side to a fixed length blow up a strip."""

before_decoding: ContextVar[Callable[[], None] | None] = ContextVar("before_decoding", default=None)
"""Called before a picture is decoded; may raise, to decode nothing for a client that left."""


def checked(data: bytes, name: str) -> tuple[Media, int]:
    """The bytes as a medium, and its pixels (width by height), after checks of header and checksums; nothing is decoded. Raises: InputError
    for anything but a still PNG, JPEG or WebP picture, or a too large one."""
    with _opened(data, name) as image:
        pixels = image.width * image.height
        try:
            image.verify()
        except Exception as error:  # a damaged file makes Pillow raise almost anything
            raise _unreadable(name, error) from error
    return Media(data, "image", name), pixels


def decoded(media: Media) -> "Image":
    """The picture in RGB. Raises: InputError as `checked`, and for a truncated picture."""
    name = media.name or f"picture {media.digest[:12]}"
    if media.modality != "image":
        raise InputError(f"{name}: {media.modality} is not supported here, give pictures (PNG, JPEG or WebP)")
    with _opened(media.data, name) as image:
        if (ask := before_decoding.get()) is not None:
            ask()
        try:
            return image.convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error


def _opened(data: bytes, name: str) -> Any:
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise _unreadable(name, error) from error
    problem = _problem(image)
    if problem:
        image.close()
        raise InputError(f"{name} {problem}")
    return image


def _problem(image: Any) -> str:
    """What is wrong with a picture's header, and the remedy; empty if nothing is."""
    width, height = image.size
    size = f"has {width} x {height} pixels: make"
    if width * height > MAX_PIXELS:
        return f"{size} it smaller than {MAX_PIXELS:,} pixels"
    if max(width, height) > MAX_SIDE:
        return f"{size} the longer side shorter than {MAX_SIDE:,} pixels"
    if max(width, height) > MAX_RATIO * min(width, height):
        return f"{size} the longer side at most {MAX_RATIO} times the shorter one"
    animated = image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False)
    return "is animated: give one frame as a picture" if animated else ""


def _unreadable(name: str, error: Exception) -> InputError:
    return InputError(
        f"{name} is not a readable image ({type(error).__name__}): give a complete PNG, JPEG or WebP file"
    )
