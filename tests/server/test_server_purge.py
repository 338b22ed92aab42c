"""Purging over HTTP: a tenant's own, or anybody's for the operator."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS, DOCUMENT, OTHER
from tests.security.probes import Trace, remains
from tests.serving import stored

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import prompt_of

OPERATOR = "the-operator"
NUMBERS = ("prompts", "rows", "parts", "encoder_outputs", "bytes")


@pytest.fixture
def tenants(engine: Any) -> Iterator[TestClient]:
    settings = ServerSettings(api_keys="alpha,beta", operator_key=OPERATOR, max_new_tokens=64, costs=COSTS)
    with TestClient(create_app(settings, engine)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(client: TestClient, key: str, document: str = DOCUMENT.text, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt_of(document, "Where does ann live?"), "max_new_tokens": 2, "temperature": 0, **more}
    answer = client.post("/v1/generate", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    stored(client)
    return answer.json()


def purge(client: TestClient, key: str, **body: Any) -> Any:
    return client.post("/v1/cache/purge", json=body, headers=bearer(key))


def test_a_tenant_purges_its_own_and_is_told_no_numbers(tenants: TestClient) -> None:
    for key in ("alpha", "beta"):
        ask(tenants, key)
    answer = purge(tenants, "alpha", all=True)
    assert answer.status_code == 200
    assert answer.json() == dict.fromkeys(NUMBERS)
    assert tenants.post("/v1/cache/clear", headers=bearer("alpha")).json() == {"cleared": None}
    assert ask(tenants, "alpha")["reuse"] == "none"
    assert ask(tenants, "beta")["reuse"] == "exact"


def test_the_operator_purges_anybodys_and_is_told_numbers(tenants: TestClient) -> None:
    for key in ("alpha", "beta"):
        ask(tenants, key)
    alpha = tenants.app.state.service.worker.pipeline.cache.store.metas()  # type: ignore[attr-defined]
    partition = next(iter(alpha)).partition
    would = purge(tenants, OPERATOR, partition=partition, dry_run=True).json()
    did = purge(tenants, OPERATOR, partition=partition).json()
    assert would == did
    assert (did["prompts"], did["bytes"] > 0) == (1, True)
    assert purge(tenants, OPERATOR, all=True).json()["prompts"] == 1


def test_a_prompt_by_the_names_that_clients_know(client: TestClient) -> None:
    mine = ask(client, "any", store_key="mine")["store_key"]
    given = ask(client, "any", OTHER.text)["store_key"]
    assert (mine, given[0]) == ("mine", "p")
    for name in (mine, given):
        assert purge(client, "any", donor=name).json()["prompts"] == 1
    assert purge(client, "any", donor=given).json()["prompts"] == 0


def test_another_tenants_prompt_is_out_of_reach(tenants: TestClient) -> None:
    ask(tenants, "beta", store_key="theirs")
    id = next(tenants.app.state.service.worker.pipeline.cache.store.metas()).id  # type: ignore[attr-defined]
    for name in ("theirs", id, f"p{id[:16]}"):
        assert purge(tenants, "alpha", donor=name).status_code == 200
    assert ask(tenants, "beta")["reuse"] == "exact"
    assert purge(tenants, "alpha", partition="key-1").status_code == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"dry_run": True}, 400), ({"older_than": -1}, 422), ({"donor": ""}, 422), ({"prompt": "x"}, 422)],
)
def test_what_selects_nothing_purges_nothing(tenants: TestClient, body: Any, status: int) -> None:
    ask(tenants, "alpha")
    assert purge(tenants, "alpha", **body).status_code == status
    assert ask(tenants, "alpha")["reuse"] == "exact"


@pytest.mark.parametrize("path", ["purge", "clear"])
def test_nothing_of_the_partition_is_left_in_the_process(tenants: TestClient, path: str) -> None:
    secret = "xqzj wvkp tlmr"
    ask(tenants, "alpha", f"{secret} {DOCUMENT.text}")
    assert tenants.post(f"/v1/cache/{path}", json={"all": True}, headers=bearer("alpha")).status_code == 200
    service = tenants.app.state.service  # type: ignore[attr-defined]
    assert remains([service], Trace((secret,))) == []
