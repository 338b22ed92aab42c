"""Errors as responses, without internal details of the server."""

import logging

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from dejakv.errors import DejaKVError, InputError
from dejakv.http.errors import RefusedError, error_object

log = logging.getLogger("dejakv.server")


def refusal_of(error: Exception) -> RefusedError:
    """What the client is told of an error. One that is not the client's is logged."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, InputError):
        return RefusedError(400, str(error))
    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail), error.headers)
    log.error("request failed", exc_info=error)
    if isinstance(error, DejaKVError):
        return RefusedError(503, "the server cannot serve this request at present")
    return RefusedError(500, "the server failed on this request")


def install(app: FastAPI, retry_after: int) -> None:
    """Registers a handler for every error."""

    async def refused(_: HttpRequest, error: Exception) -> JSONResponse:
        told = refusal_of(error)
        wait = {"Retry-After": str(retry_after)} if told.status == 429 else {}
        content = error_object(told.status, str(told), told.param, told.code)
        return JSONResponse(content, told.status, {**told.headers, **wait})

    for kind in (DejaKVError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
