"""Pictures in a chat message: data URLs only, so that a request cannot make the server fetch anything."""

import base64
import binascii

from dejakv.datasets.images import checked
from dejakv.errors import InputError
from dejakv.request import Media


def media_from_url(url: str) -> Media:
    """The picture of a `data:image/...;base64,` URL. Raises InputError for any other URL or unreadable data."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise InputError("images are taken as data URLs (data:image/png;base64,...): the server fetches nothing")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the image's base64 is damaged ({error})") from error
    return checked(raw, "the image of the message")
