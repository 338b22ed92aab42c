"""An error bound on the server: labels in idle time, figures for the caller's own partition, and settings."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS, DOCUMENTS, hits, says
from tests.serving import stored, until

from dejakv.build import build_gate
from dejakv.errors import ConfigError
from dejakv.request import Request
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv.trust.rules import PILOT

BOUND: dict[str, Any] = {"error_bound": 0.3, "confidence": 0.9, "audit_share": 1.0}
KEY = {"Authorization": "Bearer alpha"}


def settings(**more: Any) -> ServerSettings:
    kept: dict[str, Any] = {"reuse": "blend", "max_new_tokens": 64, "max_items": 0, "max_generation": 0, "costs": COSTS}
    idle: dict[str, Any] = {"promote": False, "promote_after": 0.0}
    return ServerSettings(**{**kept, **idle, **BOUND, **more})


def body(asked: Request) -> dict[str, Any]:
    return {"prompt": asked.prompt, "max_new_tokens": 2, "sim_threshold": 0.0, "temperature": 0}


def teach(client: TestClient, headers: dict[str, str]) -> None:
    for document in DOCUMENTS:
        client.post("/v1/generate", json={"prompt": document.text, "max_new_tokens": 1}, headers=headers)
        stored(client)


def served(client: TestClient, stream: Any, most: int, headers: dict[str, str]) -> list[dict[str, Any]]:
    """The answers to the next prompts, each once the one before it is labelled."""
    answers: list[dict[str, Any]] = []
    pipeline = client.app.state.service.worker.pipeline  # pyright: ignore[reportAttributeAccessIssue]
    for asked in itertools.islice(stream, most):
        answers.append(client.post("/v1/generate", json=body(asked), headers=headers).json())
        stored(client)
        until(lambda: pipeline.waiting == 0)
    return answers


def stats(client: TestClient, headers: dict[str, str]) -> dict[str, Any]:
    return client.get("/v1/cache/stats", headers=headers).json()["trust"]


def test_labels_are_made_in_idle_time_until_the_bound_opens_and_each_tenant_sees_its_own(engine: Any) -> None:
    told = settings(api_keys="alpha,beta", operator_key="operator", differs=says(itertools.repeat(False)))
    operator, other = ({"Authorization": f"Bearer {key}"} for key in ("operator", "beta"))
    with TestClient(create_app(told, engine)) as client:
        teach(client, KEY)
        stream = hits()
        first = served(client, stream, 3, KEY)
        assert not any(answer["approximate"] for answer in first)
        assert first[-1]["reason"].startswith("error bound: ")
        until(lambda: stats(client, KEY)["explored"] == 3)
        opened = next(
            answer for answer in (served(client, stream, 1, KEY)[0] for _ in range(40)) if answer["approximate"]
        )
        assert opened["reuse"] == "blend"
        until(lambda: stats(client, KEY)["audited"] == 1)
        mine, theirs, all_of_them = (stats(client, headers) for headers in (KEY, other, operator))
        assert (mine["gate"], mine["delta"], mine["confidence"], mine["served"], mine["wrong"]) == (
            "open",
            0.3,
            0.9,
            1,
            0,
        )
        assert mine["upper"] <= 0.3
        assert (theirs["gate"], theirs["explored"], theirs["served"], theirs["upper"]) == ("closed", 0, 0, None)
        assert all_of_them == mine
        text = client.get("/metrics", headers=operator).text
        for line in ("dejakv_trust_served_total 1.0", "dejakv_trust_waiting 0.0", "dejakv_trust_bound 0.3"):
            assert line in text
        assert "key-" not in text


def test_a_server_without_a_bound_says_so_and_serves_as_ever(engine: Any) -> None:
    with TestClient(create_app(settings(error_bound=None), engine)) as client:
        teach(client, {})
        assert client.post("/v1/generate", json=body(next(hits()))).json()["reuse"] == "blend"
        assert stats(client, {}) is None
        assert "dejakv_trust" not in client.get("/metrics").text


def test_closing_loses_what_waits(engine: Any, tmp_path: Path) -> None:
    told = settings(promote_after=60.0, cache_dir=str(tmp_path))
    with TestClient(create_app(told, engine)) as client:
        teach(client, {})
        for asked in itertools.islice(hits(), PILOT + 2):
            client.post("/v1/generate", json=body(asked))
            stored(client)
        cache = client.app.state.service.worker.pipeline.cache  # pyright: ignore[reportAttributeAccessIssue]
        assert cache.queue.counts.labels == PILOT + 2
    assert cache.trust(None) is None  # it is closed
    gate = build_gate(told.cache(1))
    assert gate is not None
    with closing(gate):
        assert gate.report().lost == PILOT + 2


@pytest.mark.parametrize("name", ["MAX_CONNECTIONS", "RETRY_AFTER"])
def test_a_setting_that_left_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"DEJAKV_{name}", "1")
    with pytest.raises(ConfigError, match=f"DEJAKV_{name} is no longer a setting: .*unset it"):
        ServerSettings.read()
