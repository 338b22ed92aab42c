from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.serving import Running

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings


@pytest.fixture(scope="session")
def engine(docs_engine: Any) -> Any:
    return docs_engine


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    with TestClient(create_app(ServerSettings(max_new_tokens=64, costs=COSTS), engine)) as client:
        yield client


@pytest.fixture(scope="module")
def server(engine: Any) -> Iterator[Running]:
    with Running(ServerSettings(max_new_tokens=64, costs=COSTS), engine) as running:
        yield running
