"""A server in this process, as `dejakv serve` starts it, with two keys and a small budget of entries."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from dejakv.attack.client import Pace
from dejakv.attack.target import Target, open_target
from dejakv.errors import ConfigError, MissingExtraError

ITEMS = 16
"""Entries of both keys together: few enough to be filled by an attack."""
_STARTED_SECONDS = 30.0


@contextmanager
def local_server(model: str, engine: Any, costs: tuple[float, ...], **settings: Any) -> Iterator[Target]:
    """The server of an engine that is loaded already, on a free port of this machine. `settings`: of `ServerSettings`.

    Raises: MissingExtraError without the packages of the server.
    """
    try:
        from dejakv.server.app import create_app
        from dejakv.server.listen import bound, server_of
        from dejakv.server.settings import ServerSettings
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "server", "attacking a server") from error
    keys = (secrets.token_hex(16), secrets.token_hex(16))
    given = {
        "model": model, "api_keys": ",".join(keys), "operator_key": secrets.token_hex(16), "max_items": ITEMS,
        "costs": costs, **settings,
    }  # fmt: skip
    chosen = ServerSettings(_env_file=None, **given)  # type: ignore[call-arg]
    with bound("127.0.0.1", 0) as listener:
        server = server_of(create_app(chosen, engine), chosen, log_level="critical")
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        thread.start()
        try:
            ends = time.monotonic() + _STARTED_SECONDS
            while not server.started and thread.is_alive() and time.monotonic() < ends:
                time.sleep(0.01)
            if not server.started:
                raise ConfigError("the server did not start in this process: see the log, or give --server URL")
            url = urlsplit(f"http://127.0.0.1:{listener.getsockname()[1]}")
            with closing(open_target(url, *keys, Pace(), own=True)) as target:
                yield target
        finally:
            server.should_exit = True
            thread.join(_STARTED_SECONDS)
