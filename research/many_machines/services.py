"""An S3 server and Valkey on loopback, of those that the tests start too."""

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.services import S3Server, ValkeyServer

BUCKET = "machines"


@dataclass(frozen=True)
class Services:
    """Both servers, running."""

    s3: S3Server
    valkey: ValkeyServer

    def place(self) -> str:
        """The address of a store that is empty."""
        return f"{self.s3.make_bucket(BUCKET)}/{uuid.uuid4().hex}"


@contextmanager
def services(folder: Path) -> Generator[Services]:
    """Start the servers, with their data in a folder.

    The environment then tells clients where they are.
    """
    s3, valkey = S3Server(folder / "s3"), ValkeyServer()
    try:
        s3.start()
        valkey.start()
        with mock.patch.dict(os.environ, s3.environment):
            yield Services(s3, valkey)
    finally:
        s3.stop()
        valkey.stop()
