"""Errors as responses, without internal details of the server."""

import logging

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from dejakv.errors import DejaKVError, InputError
from dejakv.http.errors import ClientGoneError, RefusedError, error_object
from dejakv.server.jobs import Cancelled, QueueFullError

log = logging.getLogger("dejakv.server")


def problem(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """OpenAI's error object, which every endpoint uses."""
    return JSONResponse(error_object(status, message, param, code), status, headers)


def install(app: FastAPI, retry_after: int) -> None:
    """Registers a handler for each kind of error."""

    @app.exception_handler(RefusedError)
    async def refused(_: HttpRequest, error: RefusedError) -> JSONResponse:
        return problem(error.status, str(error), error.headers, param=error.param, code=error.code)

    @app.exception_handler(QueueFullError)
    async def full(_: HttpRequest, error: QueueFullError) -> JSONResponse:
        return problem(429, str(error), {"Retry-After": str(retry_after)})

    @app.exception_handler(InputError)
    async def wrong(_: HttpRequest, error: InputError) -> JSONResponse:
        return problem(400, str(error))

    @app.exception_handler(DejaKVError)
    async def failed(_: HttpRequest, error: DejaKVError) -> JSONResponse:
        log.error("request failed: %s", error)
        return problem(503, "the server cannot serve this request at present")

    @app.exception_handler(Exception)
    async def broken(_: HttpRequest, error: Exception) -> JSONResponse:
        log.error("request failed", exc_info=error)
        return problem(500, "the server failed on this request")

    @app.exception_handler(Cancelled)
    async def cancelled(_: HttpRequest, __: Cancelled) -> JSONResponse:
        gone = ClientGoneError()
        return problem(gone.status, str(gone))

    @app.exception_handler(HTTPException)
    async def http(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))
