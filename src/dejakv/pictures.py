"""Pictures as bytes from strangers: their header is judged before anything is decoded, and there is one way to decode them.

Knows no engine. Pillow is loaded when the first picture comes.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from dejakv.errors import InputError
from dejakv.request import Media

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True)
class PictureLimits:
    """What a picture may be at most.

    pixels  width by height: what decoding costs
    side    the longer side
    ratio   the longer side by the shorter: processors that scale the shorter side to a fixed length blow up a strip
    """

    pixels: int = 50_000_000
    side: int = 32_768
    ratio: int = 100


LIMITS = PictureLimits()
"""What every decoder of this package takes. The server may take less."""

before_decoding: ContextVar[Callable[[], None] | None] = ContextVar("before_decoding", default=None)
"""Called before a picture is decoded. It may raise, so that nothing is decoded for a client that left."""


def checked(data: bytes, name: str, limits: PictureLimits = LIMITS) -> tuple[Media, int]:
    """The bytes as a medium, and its pixels (width by height), after a look at the header and the checksums; nothing is
    decoded. Raises InputError for what is no still PNG, JPEG or WebP picture, or a larger one than `limits`."""
    with _opened(data, name, limits) as image:
        pixels = image.width * image.height
        try:
            image.verify()
        except Exception as error:  # a damaged file makes Pillow raise almost anything
            raise _unreadable(name, error) from error
    return Media(data, "image", name), pixels


def decoded(media: Media) -> "Image":
    """The picture in RGB. Raises InputError for what `checked` refuses, and for a picture that ends early."""
    name = media.name or f"picture {media.digest[:12]}"
    if media.modality != "image":
        raise InputError(f"{name}: {media.modality} is not supported here, give pictures (PNG, JPEG or WebP)")
    with _opened(media.data, name, LIMITS) as image:
        if (ask := before_decoding.get()) is not None:
            ask()
        try:
            return image.convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error


def _opened(data: bytes, name: str, limits: PictureLimits) -> Any:
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise _unreadable(name, error) from error
    try:
        _judge(image, name, limits)
    except InputError:
        image.close()
        raise
    return image


def _judge(image: Any, name: str, limits: PictureLimits) -> None:
    width, height = image.size
    size = f"{name} has {width} x {height} pixels"
    if width * height > limits.pixels:
        raise InputError(f"{size}: make it smaller than {limits.pixels:,} pixels")
    if max(width, height) > limits.side:
        raise InputError(f"{size}: make the longer side shorter than {limits.side:,} pixels")
    if max(width, height) > limits.ratio * min(width, height):
        raise InputError(f"{size}: make the longer side at most {limits.ratio} times the shorter one")
    if image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False):
        raise InputError(f"{name} is animated: give one frame as a picture")


def _unreadable(name: str, error: Exception) -> InputError:
    return InputError(
        f"{name} is not a readable image ({type(error).__name__}): give a complete PNG, JPEG or WebP file"
    )
