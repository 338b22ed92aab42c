"""A real server on a free loopback port, in a thread."""

import threading
import time
from typing import Any

from dejakv.server.app import create_app
from dejakv.server.listen import bound, server_of
from dejakv.server.settings import ServerSettings


class Running:
    """As `dejakv serve` starts it, but with an engine that is loaded already."""

    def __init__(self, settings: ServerSettings, engine: Any) -> None:
        self.app = create_app(settings, engine)
        self.listener = bound("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.server = server_of(self.app, settings, log_level="error")
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Running":
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
