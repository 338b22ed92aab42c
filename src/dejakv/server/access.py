"""What every endpoint asks for: the service, and whose partition this is."""

import secrets

from fastapi import HTTPException
from starlette.requests import Request as HttpRequest

from dejakv.server.keys import ApiKeys
from dejakv.server.service import Service


def service_of(http: HttpRequest) -> Service:
    return http.app.state.service


def operator_only(http: HttpRequest) -> None:
    """401 where API keys are required and this is not the operator's (`DEJAKV_OPERATOR_KEY`)."""
    keys: ApiKeys = http.app.state.keys
    wanted = http.app.state.service.settings.operator_key
    given = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if keys.required and not (wanted and secrets.compare_digest(given.encode(), wanted.encode())):
        raise HTTPException(401, "the operator's key is needed: send 'Authorization: Bearer DEJAKV_OPERATOR_KEY'")


def partition_of(http: HttpRequest) -> str:
    """The partition of the caller's API key. 401 without a known key where keys are required."""
    keys: ApiKeys = http.app.state.keys
    partition = keys.partition(http.headers.get("authorization"))
    if partition is None:
        raise HTTPException(
            401, "missing or unknown API key: send 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
        )
    return partition
