"""Probing over HTTP: one key looks for what another key has left in a server.

Names of partitions in requests, budgets and the figures of stored prompts are probed in `tests/security`.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.attacks.conftest import COSTS, any_prompt, near_duplicate
from tests.serving import stored

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

OWNER, PROBER = "alpha", "beta"
ITEMS = 16
NAME = "secret-name"


@pytest.fixture(scope="module")
def client(docs_engine: Any) -> Iterator[TestClient]:
    settings = ServerSettings(api_keys=f"{OWNER},{PROBER}", operator_key="boss", max_items=ITEMS, costs=COSTS)
    with TestClient(create_app(settings, docs_engine)) as client:
        yield client


def post(client: TestClient, key: str, path: str, **body: Any) -> Any:
    reply = client.post(path, json={"temperature": 0, **body}, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    stored(client)
    return reply.json()


def complete(client: TestClient, key: str, prompt: str, mode: str = "exact", *, keep: bool = False) -> Any:
    options = {"reuse": mode, "no_store": not keep}
    return post(client, key, "/v1/completions", prompt=prompt, max_tokens=4, dejakv=options)


def generate(client: TestClient, key: str, prompt: str, **more: Any) -> Any:
    return post(client, key, "/v1/generate", prompt=prompt, max_new_tokens=4, **more)


def traces(client: TestClient, prober: str) -> set[str]:
    """What `prober` sees of a prompt that the owner has stored by a name."""
    rng, seen = random.Random("probing"), set[str]()
    equal, near = near_duplicate(rng), near_duplicate(rng)
    for prompt, name in ((equal.prompt, NAME), (near.prompt, f"{NAME}-2")):
        assert generate(client, OWNER, prompt, store_key=name)["store_key"] == name
    for mode in ("exact", "adopt", "blend"):
        for prompt in (equal.prompt, equal.duplicate):
            reply = complete(client, prober, prompt, mode)
            seen |= {f"tokens under {mode}"} if reply["dejakv"]["tokens_reused"] else set()
            seen |= {"name"} if NAME in str(reply) else set()
    for prompt, approximate in ((near.duplicate, True), (equal.prompt, False)):
        reply = generate(client, prober, prompt, use_semshare=approximate)
        seen |= {f"hit, {approximate=}"} if reply["cache_hit"] else set()
        seen |= {"score"} if reply["retrieved_sim"] is not None else set()
        seen |= {"name"} if reply["ref_key"] or NAME in str(reply) else set()
    same = any_prompt(rng)
    first, second = (generate(client, key, same)["store_key"] for key in (OWNER, prober))
    seen |= {"id"} if second in (first, None) else set()
    for key in (OWNER, PROBER):
        client.post("/v1/cache/clear", headers={"authorization": f"Bearer {key}"})
    return seen


def test_a_key_finds_no_trace_of_another_keys_prompt(client: TestClient) -> None:
    assert traces(client, PROBER) == set()


def test_a_key_finds_its_own(client: TestClient) -> None:
    """The check above can fail."""
    modes = {"tokens under exact", "tokens under adopt", "tokens under blend"}
    hits = {"hit, approximate=True", "hit, approximate=False"}
    assert traces(client, OWNER) >= {*modes, *hits, "score", "name", "id"}


@pytest.mark.parametrize("prober", [PROBER, OWNER])
def test_filling_and_clearing_remove_the_keys_own_prompts_alone(client: TestClient, prober: str) -> None:
    rng = random.Random("filling")
    kept = any_prompt(rng)
    complete(client, OWNER, kept, keep=True)
    for _ in range(2 * ITEMS):
        complete(client, prober, any_prompt(rng), keep=True)
    found = [complete(client, OWNER, kept)["dejakv"]["reuse"]]
    complete(client, OWNER, kept, keep=True)
    client.post("/v1/cache/clear", headers={"authorization": f"Bearer {prober}"})
    found.append(complete(client, OWNER, kept)["dejakv"]["reuse"])
    assert ("exact" in found) == (prober == PROBER)
    assert (found == ["exact", "exact"]) == (prober == PROBER)


def test_figures_of_all_are_the_operators(client: TestClient) -> None:
    complete(client, OWNER, any_prompt(random.Random("figures")), keep=True)
    for key, status in (("nobody", 401), (PROBER, 401), ("boss", 200)):
        reply = client.get("/metrics", headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == status
    for key, told in ((PROBER, False), ("boss", True)):
        figures = client.get("/v1/cache/stats", headers={"authorization": f"Bearer {key}"}).json()
        assert [figures.get(name) is not None for name in ("entries", "bytes")] == [told, told]
