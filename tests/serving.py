"""A real server on a free loopback port, in a thread, and how long its event loop was kept from its work."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai

from dejakv.server.app import create_app, listening_socket, server_of
from dejakv.server.settings import ServerSettings


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition. A machine may be busy: the runner's own time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def stored(client: Any) -> None:
    """Waits until what a test client's server has answered is stored: the server stores behind the answer."""
    client.app.state.service.worker.pipeline.cache.flush()


class Running:
    """As `dejakv serve` starts it, but with an engine that is loaded already.

    lag  longest time in seconds for which the event loop did not come back, as far as this process itself was busy then:
         a machine that is busy with other things does not count
    """

    def __init__(self, settings: ServerSettings, engine: Any) -> None:
        self.app = create_app(settings, engine)
        self.listener = listening_socket("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.server = server_of(self.app, settings, log_level="error")
        self.thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self.lag = 0.0
        self.http = httpx.Client(base_url=self.url, timeout=None)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection that has sent some bytes. Reading from it fails after 30 seconds."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=None)
        if sent:  # to send nothing is an error too once the server has closed the connection
            connection.sendall(sent)
        return connection

    def __enter__(self) -> "Running":
        self.thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.http.close()
        self.openai.close()

    async def _serve(self) -> None:
        beat = asyncio.create_task(self._beat())
        await self.server.serve([self.listener])
        beat.cancel()

    async def _beat(self) -> None:
        while True:
            wall, own = time.monotonic(), time.process_time()
            await asyncio.sleep(0.02)
            self.lag = max(self.lag, min(time.monotonic() - wall, time.process_time() - own))
