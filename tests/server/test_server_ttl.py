"""The time for which a request's state may be used, over HTTP."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.serving import stored

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

PATHS = {
    "/v1/generate": ({"prompt": "ann lives in paris."}, lambda ttl: {"ttl": ttl}),
    "/v1/completions": ({"prompt": "ann lives in paris."}, lambda ttl: {"dejakv": {"ttl": ttl}}),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "ann lives in paris."}]},
        lambda ttl: {"dejakv": {"ttl": ttl}},
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("own", "kept"), [(30, 30), (9000, 600), (None, 600)])
def test_it_can_only_be_shorter_than_the_servers(engine: Any, path: str, own: Any, kept: float) -> None:
    body, option = PATHS[path]
    with TestClient(create_app(ServerSettings(ttl=600, costs=COSTS), engine)) as client:
        assert client.post(path, json={**body, **(option(own) if own else {})}).status_code == 200
        stored(client)
        store = client.app.state.service.worker.pipeline.cache.store  # type: ignore[attr-defined]
        assert [meta.ttl for meta in store.metas()] == [kept]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("own", [0, -1, 1e13, "soon"])
def test_a_time_that_is_none(client: TestClient, path: str, own: Any) -> None:
    body, option = PATHS[path]
    assert client.post(path, json={**body, **option(own)}).status_code == (422 if path == "/v1/generate" else 400)
