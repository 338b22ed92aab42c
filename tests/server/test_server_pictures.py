"""Questions about pictures over HTTP: the tower runs once a picture and partition."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.serving import stored

from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import ModelChoice, open_engine
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.shapes import ShapesDataset

SAMPLES = [sample for sample in ShapesDataset(seed=3, samples=40, images=2) if sample.answer]
PICTURE = SAMPLES[0].media[0]
QUESTIONS = list({" ".join(s.question.lower().split()): s.question for s in SAMPLES if s.media[0] == PICTURE}.values())
OTHER = next(sample.media[0] for sample in SAMPLES if sample.media[0].digest != PICTURE.digest)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    engine: Any = open_engine(ModelChoice("shapes-vlm", dtype="fp32"), SemanticCacheConfig())
    settings = ServerSettings(model="shapes-vlm", api_keys="alpha,beta", reuse="exact")
    with TestClient(create_app(settings, engine)) as client:
        yield client


def ask(client: TestClient, question: str, picture: bytes, key: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}
    answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    stored(client)
    return answer.json()


def runs(client: TestClient, key: str) -> float:
    stats = client.get("/v1/cache/stats", headers={"Authorization": f"Bearer {key}"}).json()
    return stats["encoder"]["visual_cache_misses"]


@pytest.mark.shows("exact", "encoder", model="shapes-vlm")
def test_one_picture_many_questions_two_tenants(client: TestClient) -> None:
    first = ask(client, QUESTIONS[0], PICTURE.data, "alpha")
    assert first["dejakv"]["reuse"] == "none"
    again = ask(client, QUESTIONS[0], PICTURE.data, "alpha")
    assert (again["dejakv"]["reuse"], again["choices"]) == ("exact", first["choices"])
    assert ask(client, QUESTIONS[1], PICTURE.data, "alpha")["dejakv"]["reuse"] == "prefix"
    seen = runs(client, "alpha")
    other = ask(client, QUESTIONS[0], OTHER.data, "alpha")
    assert other["dejakv"]["reuse"] == "none"
    assert runs(client, "alpha") == seen + 1
    assert runs(client, "beta") == 0
    stranger = ask(client, QUESTIONS[0], PICTURE.data, "beta")
    assert (stranger["dejakv"]["reuse"], stranger["choices"]) == ("none", first["choices"])
    assert runs(client, "beta") == 1
