"""Requests refused before they reach the model, and OpenAI's error object for them."""

from fastapi.responses import JSONResponse

from dejakv.errors import DejaKVError


class RefusedError(DejaKVError):
    """A request that is refused with `status`. The message names the limit and the remedy.

    param, code  of OpenAI's error object: the field that is wrong, and what is wrong with it
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: dict[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.param, self.code = param, code


class ClientGoneError(RefusedError):
    """The client closed the connection before its answer was ready. The response has no reader."""

    def __init__(self) -> None:
        super().__init__(499, "the client left")


_KINDS = {429: "rate_limit_error", 499: "client_error", 500: "server_error", 503: "server_error"}


def problem(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """OpenAI's error object, which every endpoint uses."""
    kind = _KINDS.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)
