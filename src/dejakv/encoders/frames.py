"""Messages between this process and an encoder's, through pipes: a JSON object and raw bytes behind it. Nothing is unpickled.

u32 length of the JSON, u32 length of the bytes (little-endian), the JSON in UTF-8, the bytes
"""

import json
import os
import select
import struct
import time
from typing import Any, cast

_LENGTHS = struct.Struct("<II")
MOST = 256 << 20
"""Bytes of either part. More is no message."""


class Broken(Exception):
    """The other side is gone, silent for too long, or says something that is no message."""


def send(descriptor: int, fields: dict[str, Any], body: bytes = b"", *, timeout: float | None = None) -> None:
    """Raises: Broken. With a timeout in seconds the descriptor must be one that does not block."""
    text = json.dumps(fields).encode()
    if max(len(text), len(body)) > MOST:
        raise Broken(f"a message of {len(text) + len(body)} bytes is too long")
    deadline = _deadline(timeout)
    left = memoryview(_LENGTHS.pack(len(text), len(body)) + text + body)
    while left:
        _wait(descriptor, select.POLLOUT, deadline)
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise Broken("the other side is gone") from error


def receive(descriptor: int, *, timeout: float | None = None) -> tuple[dict[str, Any], bytes]:
    """The next message. Raises: Broken. Timeout: as `send`."""
    deadline = _deadline(timeout)
    text_length, body_length = _LENGTHS.unpack(_read(descriptor, _LENGTHS.size, deadline))
    if max(text_length, body_length) > MOST:
        raise Broken("a message that is too long")
    text, body = _read(descriptor, text_length, deadline), _read(descriptor, body_length, deadline)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Broken("a message that is no JSON") from error
    if not isinstance(fields, dict):
        raise Broken("a message that is no object")
    return cast(dict[str, Any], fields), body


def _read(descriptor: int, count: int, deadline: float | None) -> bytes:
    read = bytearray()
    while len(read) < count:
        _wait(descriptor, select.POLLIN, deadline)
        try:
            some = os.read(descriptor, min(count - len(read), 1 << 20))
        except BlockingIOError:
            continue
        except OSError as error:
            raise Broken("the other side is gone") from error
        if not some:
            raise Broken("the other side is gone")
        read += some
    return bytes(read)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _wait(descriptor: int, event: int, deadline: float | None) -> None:
    if deadline is None:
        return
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise Broken("no answer in time")
