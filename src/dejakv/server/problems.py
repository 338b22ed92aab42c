"""Errors as responses. Nothing of the inside of the server shows in them."""

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from dejakv.errors import DejaKVError, InputError
from dejakv.server.service import CLIENT_GONE, ClientGone
from dejakv.server.worker import Cancelled, QueueFullError

log = logging.getLogger("dejakv.server")


def problem(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """OpenAI's error object, which every endpoint uses."""
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)


def install(app: FastAPI, retry_after: int) -> None:
    """Registers a handler for each kind of error."""

    @app.exception_handler(QueueFullError)
    async def full(_: HttpRequest, error: QueueFullError) -> JSONResponse:
        return problem(429, str(error), "rate_limit_error", {"Retry-After": str(retry_after)})

    @app.exception_handler(InputError)
    async def wrong(_: HttpRequest, error: InputError) -> JSONResponse:
        return problem(400, str(error), "invalid_request_error")

    @app.exception_handler(DejaKVError)
    async def failed(_: HttpRequest, error: DejaKVError) -> JSONResponse:
        log.error("request failed: %s", error)
        return problem(503, "the server cannot serve this request at present", "server_error")

    @app.exception_handler(Exception)
    async def broken(_: HttpRequest, error: Exception) -> JSONResponse:
        log.error("request failed", exc_info=error)
        return problem(500, "the server failed on this request", "server_error")

    @app.exception_handler(ClientGone)
    async def gone(_: HttpRequest, __: ClientGone) -> JSONResponse:
        return problem(CLIENT_GONE, "the client left", "client_error")

    @app.exception_handler(Cancelled)
    async def cancelled(_: HttpRequest, __: Cancelled) -> JSONResponse:
        return problem(CLIENT_GONE, "the client left", "client_error")

    @app.exception_handler(HTTPException)
    async def http(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), "invalid_request_error", dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return problem(422, f"{where or 'body'}: {first['msg']}", "invalid_request_error")
