"""Dependencies of every endpoint: the service and the caller."""

from starlette.requests import Request as HttpRequest

from dejakv.http.errors import RefusedError
from dejakv.http.keys import Caller
from dejakv.request import asks_no_store
from dejakv.server.service import Service


def service_of(http: HttpRequest) -> Service:
    return http.app.state.service


def caller_of(http: HttpRequest) -> Caller:
    """The caller identified by the gate."""
    return http.state.caller


def operator_only(http: HttpRequest) -> None:
    """401 if API keys are required and this is not the operator's."""
    if not caller_of(http).operator:
        raise RefusedError(
            401, "the operator's key is needed: send 'Authorization: Bearer DEJAKV_OPERATOR_KEY'", _BEARER
        )


def partition_of(http: HttpRequest) -> str:
    """The partition of the caller's API key. 401 for the operator's, which has none."""
    partition = caller_of(http).partition
    if partition is None:
        raise RefusedError(401, "the operator's key has no partition: send one of the API keys", _BEARER)
    return partition


def no_store_of(http: HttpRequest) -> bool:
    """Whether the request's headers ask that nothing of it is kept."""
    return asks_no_store(http.headers.getlist("cache-control"))


_BEARER = {"WWW-Authenticate": "Bearer"}
