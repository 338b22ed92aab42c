import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings


@pytest.fixture(scope="session")
def engine(docs_engine: Any) -> Any:
    return docs_engine


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    with TestClient(create_app(ServerSettings(max_new_tokens=64), engine)) as client:
        yield client


@pytest.fixture
def two_tenants(engine: Any) -> Iterator[TestClient]:
    with TestClient(create_app(ServerSettings(api_keys="alpha,beta", max_new_tokens=64), engine)) as client:
        yield client


class Running:
    """A real server on a free loopback port, in a thread."""

    def __init__(self, app: Any) -> None:
        self.app = app
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", ws="none")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

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


@pytest.fixture(scope="module")
def server(engine: Any) -> Iterator[Running]:
    with Running(create_app(ServerSettings(max_new_tokens=64), engine)) as running:
        yield running
