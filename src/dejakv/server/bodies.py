"""A request's body as a checked model, the bytes of all bodies together, and the bodies in the OpenAPI document."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from dejakv.http.bodies import Limits, read_body
from dejakv.http.errors import RefusedError
from dejakv.server.settings import ServerSettings

Model = TypeVar("Model", bound=BaseModel)
_STEP = 64 * 1024
_LONGEST_MESSAGE = 300
_SETTINGS = {
    "max_bytes": "--max-body-bytes",
    "max_values": "DEJAKV_MAX_JSON_VALUES",
    "max_depth": "DEJAKV_MAX_JSON_DEPTH",
    "seconds": "DEJAKV_BODY_SECONDS",
}
_UNION_MEMBERS = ("str", "constrained-str")
"""As pydantic writes them into the place of an error, beside `list[...]`."""


class Bodies:
    """Counts the bytes of the bodies of all unanswered requests. Used only on the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.limits = Limits(
            settings.max_body_bytes, settings.max_json_values, settings.max_json_depth, settings.body_seconds, _SETTINGS
        )
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One request's share: a function that reserves bytes, all of which are released at the end."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held + size > self.settings.max_bodies_bytes:
                raise RefusedError(
                    429,
                    f"the bodies of all unanswered requests have reached {self.settings.max_bodies_bytes} bytes "
                    "(DEJAKV_MAX_BODIES_BYTES): try again in a moment",
                )
            self.held += size
            mine += size

        try:
            yield take
        finally:
            self.held -= mine


def body_of(model: type[Model], invalid: int = 422) -> Callable[[HttpRequest], AsyncIterator[Model]]:
    """A dependency: the body as a checked `model`. Its bytes count until the answer is complete.

    invalid  status of the refusal of a body that does not fit the model

    Raises: RefusedError for a body that is too large, too slow, too deep, or does not fit the model, and (429) while the
    bodies of other requests leave no room for it.
    """

    async def checked(http: HttpRequest) -> AsyncIterator[Model]:
        bodies: Bodies = http.app.state.bodies
        with bodies.share() as take:
            yield await _parsed(model, await read_body(http.scope, http.receive, bodies.limits, take), invalid)

    return checked


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a route with such a dependency."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Adds the schemas of such bodies to the OpenAPI document: FastAPI knows only those that it reads itself."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        found = plain()
        _, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        found["components"]["schemas"].update(schemas["$defs"])
        return found

    app.openapi = document


async def _parsed(model: type[Model], raw: bytes, invalid: int) -> Model:
    try:
        if len(raw) <= _STEP:
            return model.model_validate_json(raw)
        return await run_in_threadpool(model.model_validate_json, raw)
    except ValidationError as error:
        raise _refusal(error, invalid) from error


def _refusal(error: ValidationError, status: int) -> RefusedError:
    """Names the innermost field that does not fit: of a field that may be a text or a list, it is what is wrong with the list."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = max(found, key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return RefusedError(status, _not_json(first["msg"].removeprefix("Invalid JSON: ")[:_LONGEST_MESSAGE]))
    parts = [str(part) for part in first["loc"]]
    where = (
        ".".join(part for part in parts if part not in _UNION_MEMBERS and "[" not in part)[:_LONGEST_MESSAGE] or "body"
    )
    if first["type"] == "extra_forbidden":
        return RefusedError(status, f"{where}: not supported: leave it out", param=where, code="unsupported_parameter")
    message = first["msg"].removeprefix("Value error, ")[:_LONGEST_MESSAGE]
    return RefusedError(status, f"{where}: {message}", param=where, code="invalid_value")


def _not_json(why: str) -> str:
    """The remedy fits the mistake: most are quotes and commas, few are characters."""
    if "surrogate" in why or "unicode" in why.lower() or "escape" in why:
        return f"the body is not valid JSON ({why}): send UTF-8, and \\u surrogates in pairs only"
    return (
        f"the body is not valid JSON ({why}): correct it at that place (names and texts in double quotes, no comma after the "
        "last item); `python -m json.tool` shows the mistakes of a file"
    )
