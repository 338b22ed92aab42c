"""Bodies of requests: JSON, limited in size and time, and counted before it is parsed."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from dejakv.http.asgi import header_of
from dejakv.http.errors import ClientGoneError, Receive, RefusedError

# The last one may be without an end: linear in any text.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


@dataclass(frozen=True)
class BodyLimits:
    """Limits of one body. Lists and objects may be nested 200 deep, the parser's own limit.

    Attributes
    ----------
    max_bytes : int
        Size as sent.
    max_values : int
        Items of lists and fields of objects, these themselves included: parsing takes memory for
        each.
    seconds : float
        Time until the last byte has come.
    """

    max_bytes: int = 64 * 1024**2
    max_values: int = 1_000_000
    seconds: float = 60.0


async def read_body(scope: Mapping[str, Any], receive: Receive, limits: BodyLimits) -> bytes:
    """Read a JSON body within the limits. Its values are counted, but it is not parsed.

    Raises
    ------
    RefusedError
        With 400 for a wrong or repeated header, 408 for a body that is not complete in time, 413
        for too many bytes or values, and 415 for a body that is compressed or not declared as JSON.
    ClientGoneError
        If the client disconnects.
    """
    _check_headers(scope, limits)
    try:
        async with asyncio.timeout(limits.seconds):
            raw = await _read(receive, limits)
    except TimeoutError:
        message = (
            f"the body was not complete after {limits.seconds:g} seconds: send it faster, or less "
            "of it"
        )
        raise RefusedError(408, message) from None

    check_values(raw, limits.max_values)
    return raw


def check_values(raw: bytes, max_values: int) -> None:
    """Count the values of a text that may be JSON. Invalid JSON is left to the parser.

    Raises
    ------
    RefusedError
        With 413, if there are more than `max_values`.
    """
    # Far more strings than values are no JSON, and would take time. Quotes in strings have a
    # backslash before them.
    many = raw.count(b'"') - raw.count(b'\\"') > 4 * max_values + 4
    if many or sum(map(_STRING.sub(b"", raw).count, (b",", b"[", b"{"))) > max_values:
        raise RefusedError(
            413, f"the body has more than {max_values} values: send less in one request"
        )


def parse_json(raw: bytes) -> Any:
    """Parse a counted JSON body. Of a name repeated in an object the last one counts.

    Raises
    ------
    RefusedError
        With 400 for invalid JSON, half of a surrogate pair and NaN included; with 413 for nesting
        that is too deep.
    """
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RefusedError(
                413, "the body has more than 200 nested lists and objects: send a flatter one"
            ) from error
        raise RefusedError(
            400,
            f"the body is not valid JSON ({error}): correct it at that place (UTF-8, names and "
            "texts in double quotes, no comma after "
            "the last item, \\u surrogates in pairs only)",
        ) from error


def _check_headers(scope: Mapping[str, Any], limits: BodyLimits) -> None:
    encoding = header_of(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise RefusedError(
            415, "the body is compressed: send it as plain JSON, without Content-Encoding"
        )

    kind = header_of(scope, b"content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        message = "the body is not declared as JSON: send it with 'Content-Type: application/json'"
        raise RefusedError(415, message)

    length = header_of(scope, b"content-length") or "0"
    # int() would also take signs, underscores and digits of other scripts.
    if not re.fullmatch("[0-9]{1,15}", length):
        raise RefusedError(400, "Content-Length is no number: send the body's size in bytes")
    if int(length) > limits.max_bytes:
        raise _too_large(limits)


async def _read(receive: Receive, limits: BodyLimits) -> bytes:
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        piece = message.get("body", b"")
        # Counted as it comes: Content-Length may be missing or wrong.
        if len(raw) + len(piece) > limits.max_bytes:
            raise _too_large(limits)

        raw += piece
        if not message.get("more_body", False):
            return bytes(raw)


def _too_large(limits: BodyLimits) -> RefusedError:
    message = f"the body is larger than this server's limit of {limits.max_bytes} bytes: send less"
    return RefusedError(413, message)
