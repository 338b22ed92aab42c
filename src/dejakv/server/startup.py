"""The application as `dejakv serve` runs it: an error at its start is kept for one line, and not logged as a traceback."""

from typing import Any

from dejakv.errors import DejaKVError

_FAILED = "lifespan.startup.failed"


class Startup:
    """An ASGI application around another one. `failure`: the error of DejaKV with which its start ended, if it did."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.failure: DejaKVError | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification. Errors other than DejaKV's are reported and raised as the inner application does."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        held: list[Any] = []

        async def hold(message: Any) -> None:
            if message["type"] == _FAILED:  # with a traceback as text; which error it was is known once it is raised
                held.append(message)
            else:
                await send(message)

        try:
            await self._app(scope, receive, hold)
        except BaseException as error:
            if held and isinstance(error, DejaKVError):
                self.failure = error
                await send({"type": _FAILED, "message": ""})
                return
            for message in held:
                await send(message)
            raise
