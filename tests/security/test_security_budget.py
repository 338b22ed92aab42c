"""Where keys are set, what a tenant still finds of its own, and its figures, tell nothing of how much the others send."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

ITEMS = 8
"""Entries of the whole cache: four for each of two tenants."""


class Tenant:
    def __init__(self, client: TestClient, key: str) -> None:
        self.client, self.key = client, key

    def found(self, numbers: range) -> int:
        """Asks prompts by their numbers; how many of them were there already."""
        count = 0
        for number in numbers:
            words = " ".join("ann bob carl dora".split()[number // 4**place % 4] for place in range(6))
            body = {"prompt": f"{words} lives in paris.", "max_tokens": 1, "temperature": 0}
            answer = self.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {self.key}"})
            usage = answer.json()["usage"]
            count += usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
            self.client.app.state.service.worker.pipeline.cache.flush()  # type: ignore[attr-defined]
        return count

    def figures(self) -> dict[str, Any]:
        return self.client.get("/v1/cache/stats", headers={"authorization": f"Bearer {self.key}"}).json()


@pytest.mark.parametrize("sent", [0, 3, 20])
def test_what_another_sends_is_not_read_off_ones_own_hits(docs_engine: Any, sent: int) -> None:
    settings = ServerSettings(api_keys="alpha,beta", operator_key="boss", max_items=ITEMS)
    with TestClient(create_app(settings, docs_engine)) as client:
        alpha, beta, operator = (Tenant(client, key) for key in ("alpha", "beta", "boss"))
        assert beta.found(range(4)) == 0
        figures = beta.figures()
        assert figures["stored"] == 4
        assert alpha.found(range(100, 100 + sent)) == 0
        assert beta.figures() == figures
        assert operator.figures()["stored"] == 4 + sent
        assert operator.figures()["entries"] == 4 + min(4, sent)
        assert beta.found(range(4)) == 4


def test_without_keys_the_budget_is_one(docs_engine: Any) -> None:
    with TestClient(create_app(ServerSettings(max_items=ITEMS), docs_engine)) as client:
        everybody = Tenant(client, "any")
        assert everybody.found(range(ITEMS)) == 0
        assert everybody.found(range(ITEMS)) == ITEMS
