"""Pictures in a chat message: data URLs only, so that a request cannot make the server fetch anything."""

import base64
import binascii
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError
from dejakv.pictures import PictureLimits, checked
from dejakv.request import Media
from dejakv.server.settings import ServerSettings


async def pictures_of(http: HttpRequest, urls: Sequence[str], settings: ServerSettings) -> tuple[Media, ...]:
    """The pictures of a request, checked one after another off the event loop, until the client disconnects.

    Raises: InputError for too many pictures or pixels, or an invalid one; ClientGoneError.
    """
    if len(urls) > settings.max_pictures:
        raise InputError(
            f"{len(urls)} pictures in one request: this server accepts {settings.max_pictures} (DEJAKV_MAX_PICTURES): send fewer"
        )
    limits = PictureLimits(settings.max_picture_pixels, settings.max_picture_side)
    found: list[Media] = []
    total = 0
    for url in urls:
        if await http.is_disconnected():
            raise ClientGoneError
        media, pixels = await run_in_threadpool(picture_of, url, limits)
        total += pixels
        if total > settings.max_request_pixels:
            raise InputError(
                f"the pictures of one request have more than {settings.max_request_pixels:,} pixels together "
                "(DEJAKV_MAX_REQUEST_PIXELS): send fewer or smaller ones"
            )
        found.append(media)
    return tuple(found)


def picture_of(url: str, limits: PictureLimits) -> tuple[Media, int]:
    """The picture of a `data:image/...;base64,` URL and its pixels. Raises InputError for any other URL or file."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise InputError("the server fetches no images: send them as data URLs (data:image/png;base64,...)")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the image's base64 is damaged ({error}): encode the file again") from error
    return checked(raw, "the image of the message", limits)
