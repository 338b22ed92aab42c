"""Audience of each route of the OpenAI server: everybody, a client with a key, or the operator.

A route that is not listed is the operator's, so that a route of a new vLLM is closed until it was
looked at. `tests/adopt` compares the lists with the routes of vLLM's own application.
"""

from collections.abc import Mapping
from typing import Any, Literal

from dejakv.http.asgi import route_path

Audience = Literal["everybody", "client", "operator"]

EVERYBODY = frozenset(
    {
        *((method, path) for method in ("GET", "HEAD") for path in (
            "/health", "/ping", "/version", "/load", "/metrics", "/v1/models",
            "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
        )),
        ("POST", "/ping"),
    }
)  # fmt: skip
"""Requests that give out no client's data and no answers."""

CLIENT = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/systemone",
        "/generative_scoring",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
    }
)
"""POST with a JSON object, which `openai_body.restrict_to_partition` gives the key's partition."""

ADOPTING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths among these with adoption."""


def audience(scope: Mapping[str, Any]) -> Audience:
    """Return who may send this request.

    Method and path must be exactly those that are listed; a WebSocket is the operator's.
    """
    method, path = scope.get("method"), route_path(scope)
    if scope["type"] != "http":
        return "operator"
    # OPTIONS: a browser asks before it sends.
    if (method, path) in EVERYBODY or (method == "OPTIONS" and path in CLIENT):
        return "everybody"

    return "client" if method == "POST" and path in CLIENT else "operator"
