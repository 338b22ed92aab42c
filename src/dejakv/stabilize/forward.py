"""ASGI application that passes requests on to a server at another address, byte for byte."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx

from dejakv.errors import ConfigError
from dejakv.http.errors import Receive, RefusedError, Scope, Send, refuse

_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1)."""


class ForwardingApp:
    """Application whose answers are those of another server. Streams are passed on as they come.

    Parameters
    ----------
    url : str
        Address of the server, with or without `/v1`.
    transport : httpx.AsyncBaseTransport, optional
        Where requests go in place of the network.

    Raises
    ------
    ConfigError
        For what is no address, for one with a user name or a password, and for authorities in
        `SSL_CERT_FILE` or `SSL_CERT_DIR` that cannot be read.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        # What stands before the @ is no part of a message.
        shown = url.rpartition("@")[2]
        try:
            address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{shown!r} is no address: give one such as http://host:8000"
            ) from error
        if address.userinfo:
            raise ConfigError(
                f"the address of {shown!r} has a user name or a password, which would take the"
                " place of clients' keys: leave it out, and let clients send the header"
                " Authorization"
            )
        if address.scheme not in ("http", "https") or not address.host or address.query:
            raise ConfigError(f"{shown!r} is no address: give one such as http://host:8000")

        self._address = address
        # A long prompt may take many minutes until its first byte.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10),
            # Servers close idle connections after some seconds: this side is to be the first.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=2
            ),
            transport=transport,
            # A .netrc would replace clients' keys; of the environment authorities alone are read.
            trust_env=False,
            verify=_authorities(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await refuse(scope, send, RefusedError(501, "WebSockets are not passed on: use HTTP"))
            return

        sent = asyncio.Event()
        try:
            request = self._request(scope, receive, sent)
        except RefusedError as error:
            await refuse(scope, send, error)
            return
        answer = asyncio.ensure_future(self._answer(request, scope, send))
        gone = asyncio.ensure_future(_until_gone(receive, sent))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A client that leaves ends the request on the other server, too.
            for task in (answer, gone):
                task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            raise error

    def _request(self, scope: Scope, receive: Receive, sent: asyncio.Event) -> httpx.Request:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        target = self._address.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        try:
            # Dots would lead out of the address, here or on the server.
            if not path.startswith(b"/") or {b".", b".."} & {*unquote_to_bytes(path).split(b"/")}:
                raise ValueError
            url = self._address.copy_with(raw_path=target)
        except (ValueError, httpx.InvalidURL) as error:
            raise RefusedError(
                400,
                "the target is not passed on: send a path from / on, in ASCII, without . and ..",
            ) from error
        headers = [item for item in _end_to_end(scope["headers"]) if item[0].lower() != b"host"]
        names = {name.lower() for name, _ in scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        if not has_body:
            sent.set()
        content = _body(receive, sent) if has_body else None
        return httpx.Request(scope["method"], url, headers=headers, content=content)

    async def _answer(self, request: httpx.Request, scope: Scope, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            about = f"{self._address} cannot be reached ({type(error).__name__}): start it"
            await refuse(scope, send, RefusedError(502, about))
            return
        try:
            headers = [(name.lower(), value) for name, value in _end_to_end(response.headers.raw)]
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": headers,
                }
            )
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})


def _authorities() -> ssl.SSLContext:
    """Return TLS with the authorities that `SSL_CERT_FILE` or `SSL_CERT_DIR` name, or httpx's."""
    try:
        return httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the authorities of SSL_CERT_FILE {os.environ.get('SSL_CERT_FILE', '')!r} or"
            f" SSL_CERT_DIR cannot be read ({error}): give a PEM file with their certificates"
        ) from error


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers without those of the connection, which `Connection` may name, too."""
    headers = list(headers)
    named = [value.lower() for name, value in headers if name.lower() == b"connection"]
    hop = _HOP | {name.strip() for value in named for name in value.split(b",")}
    return [item for item in headers if item[0].lower() not in hop]


async def _body(receive: Receive, sent: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message: Any = await receive()
        if message["type"] != "http.request":
            raise httpx.RequestError("the client left")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            sent.set()
            return


async def _until_gone(receive: Receive, sent: asyncio.Event) -> None:
    """Wait until a client that has sent its request leaves."""
    await sent.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
