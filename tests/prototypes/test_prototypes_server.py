"""SemanticShareKV's commands and endpoints, as its document writes them."""

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.prototypes.conftest import Names

from dejakv.cli.main import app
from dejakv.models import path
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import edit, make_document, prompt_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "semsharekv.py"


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    names = Names("example")
    runpy.run_path(str(EXAMPLE))["main"](names.line(["--model_dir", str(path("docs-lm"))]))
    assert "blended: " in capsys.readouterr().out
    names("python examples/example_semsharekv.py")
    names.done()


def test_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of the command reach the settings that a server is made with; it is not started."""
    names = Names("server")
    made: list[Any] = []

    class Stop(Exception):
        pass

    def remember(settings: ServerSettings, *_: object) -> None:
        made.append(settings)
        raise Stop

    monkeypatch.setattr("dejakv.server.app.create_app", remember)
    line = names.line(["--model_dir", str(path("docs-lm")), "--port", "0", "--max_items", "64"])
    monkeypatch.setattr(sys, "argv", ["dejakv", "serve", *line])
    with pytest.raises(Stop):
        app()
    (settings,) = made
    assert (settings.model, settings.port, settings.max_items) == (str(path("docs-lm")), 0, 64)
    assert (ServerSettings().port, ServerSettings().max_items) == (8008, 64)
    names("python -m semsharekv.server")
    names.done()


def test_generate(docs_engine: Any) -> None:
    names = Names("generate")
    rng = random.Random(5)
    document = make_document(rng, facts=24)
    edited = edit(document, rng, facts=1)
    question = edited.questions[0].text
    body = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "use_semshare": True, "sim_threshold": 0.8}
    with TestClient(create_app(ServerSettings(costs=COSTS), docs_engine)) as client:
        first = client.post(
            "/v1/generate", json={**body, "prompt": prompt_of(document.text, question), "store_key": None}
        )
        assert first.status_code == 200, first.text
        donor = first.json()
        assert (donor["cache_hit"], donor["used_semshare"], donor["ref_key"]) == (False, False, None)
        assert donor["store_key"].startswith("p")
        client.app.state.service.worker.pipeline.cache.flush()  # type: ignore[attr-defined]
        assert client.get("/v1/cache/stats").json()["entries"] == 1
        similar = {**body, "prompt": prompt_of(edited.target.text, question), "temperature": 0, "top_p": 1.0}
        again = client.post("/v1/generate", json=similar).json()
        assert (again["cache_hit"], again["used_semshare"]) == (True, True)
        assert again["ref_key"] == donor["store_key"]
        assert 0.8 <= again["retrieved_sim"] <= 1
        assert isinstance(again["text"], str)
        names.having(again)
        names.having(similar)
        names("store_key")
        assert client.post("/v1/cache/clear").json()["cleared"] == 1
        assert client.get("/v1/cache/stats").json()["entries"] == 0
        assert json.loads(client.get("/openapi.json").text)["paths"].keys() >= {"/v1/generate", "/v1/cache/stats"}
    names("POST /v1/generate", "GET /v1/cache/stats", "POST /v1/cache/clear")
    names.done()
