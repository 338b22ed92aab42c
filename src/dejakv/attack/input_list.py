"""Requests that no client should send, and bytes that are no request."""

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

COMPLETE, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"


@dataclass(frozen=True)
class Input:
    """A request that must be refused.

    headers  beside the key; `raw`: bytes of a whole connection instead of a request, which may also just be closed
    """

    name: str
    path: str = COMPLETE
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    method: str = "POST"
    raw: bytes = b""


def inputs(largest: int, context: int, authorization: str = "") -> Iterator[Input]:
    """All of them. `largest`: bytes of the largest body; `context`: words that no prompt of the model may have;
    `authorization`: the header's value, so that connections of bytes are not refused for it."""
    yield from _bodies(largest)
    yield from _prompts(context)
    yield from _values()
    yield from _pictures()
    yield from _requests()
    yield from _connections(authorization)


def _bodies(largest: int) -> Iterator[Input]:
    some = min(largest, 1 << 20)
    yield Input("the largest body", body=b'{"prompt":"' + b"a " * (largest // 2) + b'"}')
    yield Input("nested lists", body=b'{"prompt":' + b"[" * some)
    yield Input("nested objects", body=b'{"a":' * (some // 5))
    yield Input("many lists", body=b'{"prompt":[' + b"[]," * (some // 3) + b"[]]}")
    yield Input("many fields", body=b"{" + b'"a":0,' * (some // 6) + b'"prompt":"x"}')
    yield Input("many digits", body=b'{"prompt":"x","seed":' + b"9" * some + b"}")
    yield Input("a huge exponent", body=b'{"prompt":"x","temperature":1e999999}')
    yield Input("blanks", body=b" " * some)
    yield Input("no JSON", body=b"prompt=x")
    yield Input("half of JSON", body=b'{"prompt":"x"')
    yield Input("nothing", body=b"")
    yield Input("broken UTF-8", body=b'{"prompt":"\xff\xfe\xc3\x28"}')
    yield Input("a lone surrogate", body=b'{"prompt":"\\ud800"}')
    yield Input("UTF-16", body='{"prompt":"x"}'.encode("utf-16"))
    yield Input("a pickle", body=b"\x80\x04cposix\nsystem\n.")
    yield Input("compressed", body=zlib.compress(b"[" * some), headers={"Content-Encoding": "deflate"})
    yield Input("a form", body=b"a=" + b"b" * 1000, headers={"Content-Type": "application/x-www-form-urlencoded"})


def _prompts(context: int) -> Iterator[Input]:
    words = "the home of ann is in rome . " * (context // 7)
    yield Input("a prompt longer than the context", body=_json({"prompt": words}))
    yield Input("a longer one for chat", CHAT, _json({"messages": [{"role": "user", "content": words}]}))
    yield Input("a longer one for generate", GENERATE, _json({"prompt": words}))
    yield Input("an empty prompt", body=_json({"prompt": "   "}))
    yield Input("many prompts", body=_json({"prompt": ["x"] * 1000}))
    yield Input("thousands of messages", CHAT, _json({"messages": [{"role": "user", "content": ""}] * 5000}))
    yield Input("an unknown role", CHAT, _json({"messages": [{"role": "a" * 10_000, "content": "x"}]}))


def _values() -> Iterator[Input]:
    for name, value in (
        ("max_tokens", -1), ("max_tokens", 10**30), ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("n", 100),
        ("seed", -(10**30)), ("stop", ["a"] * 100), ("stop", 5), ("dejakv", {"reuse": "always"}), ("dejakv", {"threshold": 2}),
        ("dejakv", {"partition": "other"}), ("dejakv", {"order": "free", "parts": ["not there"]}), ("model", "../../etc/passwd"),
    ):  # fmt: skip
        yield Input(f"{name}: {str(value)[:20]}", body=_json({"prompt": "x", name: value}))
    yield Input("not a number", body=b'{"prompt":"x","temperature":NaN}')
    yield Input("a huge name", GENERATE, _json({"prompt": "x", "store_key": "a" * 100_000}))


def _pictures() -> Iterator[Input]:
    bomb = _png(60_000, 60_000)
    for name, url in (
        ("a picture of 3.6 thousand million pixels", "data:image/png;base64," + base64.b64encode(bomb).decode()),
        ("a picture from this machine", "file:///etc/passwd"),
        ("a picture from a network", "http://127.0.0.1:1/a.png"),
        ("a picture that is none", "data:image/png;base64,AAAA"),
    ):
        yield _pictured(name, [url])
    yield _pictured("hundreds of pictures", ["data:image/png;base64," + base64.b64encode(_png(1, 1)).decode()] * 300)


def _pictured(name: str, urls: list[str]) -> Input:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "x"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return Input(name, CHAT, _json({"messages": [{"role": "user", "content": parts}]}))


def _requests() -> Iterator[Input]:
    yield Input(
        "thousands of parameters", path=f"{COMPLETE}?{'&'.join(f'a{n}=b' for n in range(5000))}", body=b'{"prompt":"x"}'
    )
    yield Input("hundreds of headers", body=b'{"prompt":"x"}', headers={f"x-{n}": "1" for n in range(300)})
    yield Input("a large header", body=b'{"prompt":"x"}', headers={"x": "a" * 60_000})
    yield Input("a long path", path="/" + "a" * 60_000, method="GET")
    yield Input("a path upwards", path="/docs/../../../../etc/passwd", method="GET")
    yield Input("an unknown path", path="/v1/admin", body=b"{}")
    yield Input("another method", path=COMPLETE, method="DELETE")


def _connections(authorization: str) -> Iterator[Input]:
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nAuthorization: {authorization}\r\n".encode()
    head += b"Content-Type: application/json\r\n"
    yield Input("two lengths", raw=head + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n{}")
    yield Input("a negative length", raw=head + b"Content-Length: -5\r\n\r\n")
    yield Input("a length of a terabyte", raw=head + b"Content-Length: 1099511627776\r\n\r\n{")
    yield Input("a length and chunks", raw=head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    yield Input("chunks of no size", raw=head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n")
    yield Input("no HTTP", raw=b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 4 + b"\r\n\r\n")
    yield Input("a line without end", raw=b"GET /" + b"a" * 100_000)
    yield Input("a header in two lines", raw=b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\nB\x00: d\r\n\r\n")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _png(width: int, height: int) -> bytes:
    """A grey PNG whose header says so, with hardly any pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
