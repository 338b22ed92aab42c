"""The body of an HTTP request as one JSON object, within limits; what is wrong with it is answered here."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dejakv.errors import DejaKVError


@dataclass(frozen=True)
class Limits:
    """Of one body.

    max_bytes   as it is sent
    max_values  commas and opening brackets, which no body has fewer of than values: parsing takes memory for each
    max_depth   of arrays and objects within one another
    seconds     until the last byte must have come
    """

    max_bytes: int = 64 * 1024**2
    max_values: int = 1_000_000
    max_depth: int = 64
    seconds: float = 60.0


class Refused(DejaKVError):
    """A request that is answered with `status` and goes no further."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_object(scope: Mapping[str, Any], receive: Any, limits: Limits) -> dict[str, Any]:
    """The JSON object that is sent. Raises Refused.

    Of a name that an object has twice the last one counts; since the body is written anew, it counts for the server too.
    """
    _check_headers(scope, limits)
    try:
        async with asyncio.timeout(limits.seconds):
            raw = await _read(receive, limits)
    except TimeoutError:
        raise Refused(
            408, f"the body did not come within {limits.seconds:g} s: send it faster, or less of it"
        ) from None
    return await asyncio.to_thread(parse_object, raw, limits)


def parse_object(raw: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object in `raw`, which is UTF-8. Raises Refused."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > limits.max_values:
        raise Refused(413, f"the body has more than {limits.max_values} values: send less in one request")
    deep = Refused(400, f"the body is nested more than {limits.max_depth} deep: send a flatter one")
    try:
        body = json.loads(raw.decode(), parse_constant=_no_number)
    except RecursionError:
        raise deep from None
    except ValueError as error:  # no UTF-8, no JSON, or a number that is too long
        raise Refused(400, f"the body is no JSON in UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object: send {...}")
    if _is_deeper(body, limits.max_depth):
        raise deep
    return cast(dict[str, Any], body)


def written(body: Mapping[str, Any]) -> bytes:
    """The body as it is passed on. Raises Refused for text that no encoding has."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"the body has text that is no Unicode: {error.reason}") from error


def _check_headers(scope: Mapping[str, Any], limits: Limits) -> None:
    encoding = header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise Refused(415, "the body is compressed: send it as plain JSON, without Content-Encoding")
    kind = header(scope, b"content-type")
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the body is no JSON: send it with 'Content-Type: application/json'")
    length = header(scope, b"content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
        raise Refused(400, "Content-Length is no number")
    if length is not None and int(length) > limits.max_bytes:
        raise Refused(413, f"the body is larger than {limits.max_bytes} bytes")


def header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """A header's value, None without it. Raises Refused if it is there twice."""
    values = headers(scope, name)
    if len(values) > 1:
        raise Refused(400, f"the header {name.decode()} is there {len(values)} times: send it once")
    return values[0] if values else None


def headers(scope: Mapping[str, Any], name: bytes) -> list[str]:
    """The values of a header that may be there several times."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


async def _read(receive: Any, limits: Limits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client left before its body had come")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.max_bytes:
            raise Refused(413, f"the body is larger than {limits.max_bytes} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _is_deeper(body: Any, limit: int) -> bool:
    level: list[Any] = [body]
    for _ in range(limit):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else cast(list[Any], value))
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
