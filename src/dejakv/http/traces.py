"""The span of an HTTP request, for an ASGI application."""

from collections.abc import Mapping
from typing import Any

from dejakv import tracing
from dejakv.http.asgi import route_path
from dejakv.http.errors import Receive, Scope, Send

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/generate": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""Paths of traced requests, with `gen_ai.operation.name`."""


class TraceMiddleware:
    """ASGI middleware that makes a span of each request for an answer; see `serve_traced`.

    Parameters
    ----------
    app : Any
        The application behind it.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, within its span."""
        await serve_traced(self.app, scope, receive, send)


async def serve_traced(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Let an application answer a request within a span of it.

    The trace of the header `traceparent` is continued, and the application gets the span's own
    headers in its place. Where traces are off, and for other requests than a POST to a path of
    `OPERATIONS`, the request is passed on as it is. A status of 500 or more marks the span failed.

    Parameters
    ----------
    app : Any
        ASGI application that answers.
    scope, receive, send : Scope, Receive, Send
        The request, as ASGI gives it.
    """
    traced = tracing.is_on() and scope["type"] == "http" and scope["method"] == "POST"
    path = route_path(scope) if traced else ""
    # Names that a list has: a client's path could be anything.
    if path not in OPERATIONS:
        await app(scope, receive, send)
        return

    attributes = {
        "http.request.method": "POST",
        "http.route": path,
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "dejakv",
    }
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    with tracing.span(f"POST {path}", attributes, headers=headers, server=True) as span:

        async def noting(message: Any) -> None:
            if span is not None and message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                # A client's error is no failure of the server.
                if message["status"] >= 500:
                    tracing.mark_failed(span, str(message["status"]))
            await send(message)

        forwarded = {
            name.encode(): value.encode() for name, value in tracing.forward_headers().items()
        }
        if forwarded:
            others = [item for item in scope["headers"] if item[0].lower() not in forwarded]
            scope = {**scope, "headers": [*others, *forwarded.items()]}
        await app(scope, receive, noting)
