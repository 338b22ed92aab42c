"""Bodies of requests: JSON, read within limits of size and time, and counted before anything is built from it."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dejakv.http.asgi import header_of
from dejakv.http.errors import ClientGoneError, Receive, RefusedError

_STRING = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL
)  # the last one may be without an end: linear in any text
_BRACKET = re.compile(rb"[\[\]{}]")
_HERE = 64 * 1024
"""Bytes up to which a body is counted on the event loop."""


@dataclass(frozen=True)
class Limits:
    """Of one body.

    max_bytes   as it is sent
    max_values  items of lists and fields of objects, these themselves included: parsing takes memory for each
    max_depth   of lists and objects within one another
    seconds     until the last byte must have come
    settings    by the names above, what an operator raises them with: named in refusals
    """

    max_bytes: int = 64 * 1024**2
    max_values: int = 1_000_000
    max_depth: int = 64
    seconds: float = 60.0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def refusal(self, limit: str, message: str, status: int = 413) -> RefusedError:
        """Of a body over a limit."""
        setting = f", or raise {self.settings[limit]} at the server" if limit in self.settings else ""
        return RefusedError(status, message + setting, {"Connection": "close"} if status == 408 else None)


async def read_body(
    scope: Mapping[str, Any], receive: Receive, limits: Limits, take: Callable[[int], None] = lambda size: None
) -> bytes:
    """The JSON that is sent, counted but not parsed. `take` hears of each piece's size.

    Raises: RefusedError with 400, 408, 413 or 415; ClientGoneError.
    """
    _check_headers(scope, limits)
    try:
        async with asyncio.timeout(limits.seconds):
            raw = await _read(receive, limits, take)
    except TimeoutError:
        message = f"the body was not complete after {limits.seconds:g} seconds: send it faster, or less of it"
        raise limits.refusal("seconds", message, 408) from None
    if len(raw) <= _HERE:
        check_json(raw, limits)
    else:
        await asyncio.to_thread(check_json, raw, limits)
    return raw


def check_json(raw: bytes, limits: Limits) -> None:
    """Counts depth and values of a text that may be JSON; a parser rejects what is none.

    Raises: RefusedError (413).
    """
    message = f"the body has more than {limits.max_values} values: send less in one request"
    many = limits.refusal("max_values", message)
    # More strings than fields have, without commas, are no JSON, and would take time. Quotes in strings have a backslash before them.
    if raw.count(b'"') - raw.count(b'\\"') > 4 * limits.max_values + 4:
        raise many
    bare, strings = _STRING.subn(b"", raw)
    if sum(map(bare.count, (b",", b"[", b"{"))) > limits.max_values or strings > 2 * limits.max_values + 2:
        raise many
    depth = 0
    for mark in _BRACKET.finditer(bare):
        depth += 1 if mark.group() in b"[{" else -1
        if depth > limits.max_depth:
            message = f"the body has more than {limits.max_depth} nested lists and objects: send a flatter one"
            raise limits.refusal("max_depth", message)
        if depth < 0:
            return


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body that was counted. Of a name that an object has twice the last one counts.

    Raises: RefusedError (400).
    """
    try:
        body = json.loads(raw.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number that is too long
        raise RefusedError(400, f"the body is no JSON in UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "the body is no JSON object: send {...}")
    return cast(dict[str, Any], body)


def written(body: Mapping[str, Any]) -> bytes:
    """The body as a proxy passes it on. Raises: RefusedError for text that no encoding has."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError(400, f"the body has text that is no Unicode: {error.reason}") from error


def _check_headers(scope: Mapping[str, Any], limits: Limits) -> None:
    encoding = header_of(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise RefusedError(415, "the body is compressed: send it as plain JSON, without Content-Encoding")
    kind = header_of(scope, b"content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the body is not declared as JSON: send it with 'Content-Type: application/json'")
    length = header_of(scope, b"content-length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise RefusedError(400, "Content-Length is no number: send the body's size in bytes")
    if length is not None and (len(length) > 15 or int(length) > limits.max_bytes):
        raise _too_large(limits)


async def _read(receive: Receive, limits: Limits, take: Callable[[int], None]) -> bytes:
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        piece = message.get("body", b"")
        if len(raw) + len(piece) > limits.max_bytes:
            raise _too_large(limits)
        take(len(piece))
        raw += piece
        if not message.get("more_body", False):
            return bytes(raw)


def _too_large(limits: Limits) -> RefusedError:
    message = f"the body is larger than this server's limit of {limits.max_bytes} bytes: send less"
    return limits.refusal("max_bytes", message)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
