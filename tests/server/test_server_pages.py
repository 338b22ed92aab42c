"""The page for people, which needs nothing from another host, and what the figures and messages say."""

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

PROMPT = "<s> Ann lives in Paris. Bob lives in Rome. Cleo works as a baker. <q> Where does Bob live? <a>"


def linked(page: str) -> list[str]:
    """Addresses that a browser loads for a page."""
    return re.findall(r"""(?:src|href)=["']([^"']+)["']""", page) + re.findall(r"url: '([^']+)'", page)


def test_the_documentation_loads_nothing_from_another_host(client: TestClient) -> None:
    page = client.get("/docs").text
    addresses = linked(page)
    assert len(addresses) >= 4
    for address in addresses:
        assert address.startswith("/"), address
        answer = client.get(address)
        assert answer.status_code == 200
        assert answer.content
    assert client.get("/docs/%2e%2e/%2e%2e/%2e%2e/etc/passwd").status_code == 404
    assert '"validatorUrl": null' in page
    assert b"SwaggerUIBundle" in client.get("/docs/swagger-ui-bundle.js").content
    assert "text/css" in client.get("/docs/swagger-ui.css").headers["content-type"]


def test_the_documentation_under_a_proxys_path(engine: Any) -> None:
    with TestClient(create_app(ServerSettings(), engine), root_path="/kv") as client:
        for page in ("/kv/docs", "/kv/"):  # the second one leads to the first
            addresses = linked(client.get(page).text)
            assert addresses
            for address in addresses:
                assert address.startswith("/kv/")
                assert client.get(address).status_code == 200, address


def test_every_lookup_is_a_hit_a_prefix_hit_or_a_miss(client: TestClient) -> None:
    body = {"max_new_tokens": 1, "temperature": 0}
    for prompt in (PROMPT, PROMPT, PROMPT.replace("Where does Bob live", "What city does Ann live in")):
        client.post("/v1/generate", json={**body, "prompt": prompt})
    stats = client.get("/v1/cache/stats").json()
    assert stats["prefix_hits"] == 1
    assert stats["lookups"] == sum(stats["hits"].values()) + stats["prefix_hits"] + stats["misses"] == 3
    assert stats["misses"] == 1


def test_an_answer_says_why_what_was_found_was_not_used(client: TestClient) -> None:
    body = {"max_new_tokens": 1, "temperature": 0}
    changed = PROMPT.replace("Paris", "Oslo")
    first = client.post("/v1/generate", json={**body, "prompt": PROMPT}).json()
    assert (first["cache_hit"], first["reason"]) == (False, "no stored prompt begins like this one")
    similar = client.post("/v1/generate", json={**body, "prompt": changed, "use_semshare": False}).json()
    assert similar["reuse"] in ("none", "prefix")
    assert "content words differ" in similar["reason"]
    asked = {"prompt": f"{PROMPT}.", "max_tokens": 1, "temperature": 0}
    completed = client.post("/v1/completions", json=asked).json()
    assert "not asked for" in completed["dejakv"]["reason"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"prompt": "a",}', "no comma after the last item"),
        (b"{'prompt': 'a'}", "double quotes"),
        (b'{"prompt": "\\ud800"}', "surrogates in pairs"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
def test_broken_json_names_the_place_and_the_remedy(client: TestClient, raw: bytes, says: str) -> None:
    answer = client.post("/v1/generate", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "line 1 column" in message
    assert says in message
