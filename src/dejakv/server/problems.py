"""Responses for errors, without internal details of the server."""

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from dejakv.errors import DejaKVError, InputError
from dejakv.http.errors import RefusedError, error_object

log = logging.getLogger("dejakv.server")

RETRY_AFTER = "1"
"""Seconds until a client refused by a full server may try again."""
ELSEWHERE = "vLLM's own server, which takes DejaKV as its KV connector (docs/how-to/vllm.md)"
_LONGEST_MESSAGE = 300
_UNION_MEMBERS = ("body", "str", "constrained-str")
"""As FastAPI and pydantic write them into the place of an error, beside `list[...]`."""


def refusal_of(error: Exception) -> RefusedError:
    """Choose the response to an error. An error of the server is logged."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, InputError):
        return RefusedError(400, str(error))
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException) and error.status_code == 404:
        return RefusedError(
            404,
            "there is no such endpoint: /docs lists those of this server; more are served by "
            f"{ELSEWHERE}",
        )

    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail), error.headers)
    # Below are the server's own faults, whose details are in its log alone.
    log.error("request failed", exc_info=error)
    if isinstance(error, DejaKVError):
        return RefusedError(503, "the server cannot serve this request at present")

    return RefusedError(500, "the server failed on this request")


def install(app: FastAPI) -> None:
    """Register a handler that answers every error of an application in OpenAI's form."""

    async def refused(http: HttpRequest, error: Exception) -> JSONResponse:
        refusal = refusal_of(error)
        status = refusal.status
        if status == 422 and "openai" in http.scope["route"].tags:
            # As OpenAI's clients expect.
            status = 400
        wait = {"Retry-After": RETRY_AFTER} if status == 429 else {}
        content = error_object(status, str(refusal), refusal.param, refusal.code)
        return JSONResponse(content, status, {**refusal.headers, **wait})

    for kind in (DejaKVError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)


def _invalid(error: RequestValidationError) -> RefusedError:
    """Name the innermost wrong field: of a field for a text or a list, the fault of the list."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    parts = [str(part) for part in first["loc"]]
    where = ".".join(part for part in parts if part not in _UNION_MEMBERS and "[" not in part)[
        :_LONGEST_MESSAGE
    ]
    where = where or "body"
    if first["type"] == "extra_forbidden":
        message = f"{where}: not supported: leave it out; more fields are served by {ELSEWHERE}"
        return RefusedError(422, message, param=where, code="unsupported_parameter")

    message = first["msg"].removeprefix("Value error, ")[:_LONGEST_MESSAGE]
    return RefusedError(422, f"{where}: {message}", param=where, code="invalid_value")
