"""ASGI application that passes requests on to a server at another address, byte for byte."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

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
        For what is no address.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{url!r} is no address: give one such as http://host:8000"
            ) from error
        if address.scheme not in ("http", "https") or not address.host or address.query:
            raise ConfigError(f"{url!r} is no address: give one such as http://host:8000")

        self._address = address
        # A long prompt may take many minutes until its first byte.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
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
        answer = asyncio.ensure_future(
            self._answer(self._request(scope, receive, sent), scope, send)
        )
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
        path = self._address.raw_path.rstrip(b"/") + (
            scope.get("raw_path") or scope["path"].encode()
        )
        query = scope.get("query_string", b"")
        url = self._address.copy_with(raw_path=path + (b"?" + query if query else b""))
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() not in (*_HOP, b"host")
        ]
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
            headers = [item for item in response.headers.raw if item[0].lower() not in _HOP]
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": [(name.lower(), value) for name, value in headers],
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
