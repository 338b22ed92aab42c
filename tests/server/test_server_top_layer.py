"""Top-layer reuse over HTTP: what the response says of it, what is kept, and which models and requests are refused."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.asking import COSTS
from tests.serving import stored

from dejakv.errors import ConfigError
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import edit, make_document, prompt_of

RNG = random.Random(5)
DOCUMENT = make_document(RNG, facts=16)
EDITED = edit(DOCUMENT, RNG, facts=1)
QUESTION = EDITED.questions[0]
PROMPT, SIMILAR = (prompt_of(text, QUESTION.text) for text in (DOCUMENT.text, EDITED.target.text))
SETTINGS = ServerSettings(model="docs-lckv", reuse="top_layer", costs=COSTS, max_new_tokens=64, promote=False)


@pytest.fixture(scope="module")
def condensed() -> Any:
    from dejakv.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained("docs-lckv", dtype="fp32", device="cpu")


@pytest.fixture
def client(condensed: Any) -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS, condensed)) as client:
        yield client


def generate(client: TestClient, prompt: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/generate", json={"prompt": prompt, "temperature": 0, "max_new_tokens": 4, **more})
    assert answer.status_code == 200, answer.text
    stored(client)
    return answer.json()


def test_a_similar_prompt_takes_the_top_layer_and_the_response_says_so(client: TestClient) -> None:
    base, similar = generate(client, PROMPT), generate(client, SIMILAR)
    assert similar["text"] == QUESTION.answer
    assert (similar["reuse"], similar["level"], similar["approximate"]) == ("top_layer", "copied", True)
    assert (similar["used_semshare"], similar["store_key"]) == (True, None)
    assert similar["ref_key"] == base["store_key"]
    assert 0 < similar["tokens_computed"] < similar["tokens_computed"] + similar["tokens_reused"]
    again = generate(client, SIMILAR, use_semshare=False)
    assert again["reuse"] in ("none", "prefix")
    assert again["text"] == QUESTION.answer
    assert generate(client, SIMILAR)["reuse"] == "exact"


@pytest.mark.parametrize(("asked", "given"), [({}, False), ({"reuse": "top_layer"}, True)])
def test_openais_clients_get_it_where_they_ask_for_it(client: TestClient, asked: dict[str, Any], given: bool) -> None:
    generate(client, PROMPT)
    body = {"model": "docs-lckv", "prompt": SIMILAR, "max_tokens": 4, "temperature": 0, "dejakv": asked}
    origin = client.post("/v1/completions", json=body).json()["dejakv"]
    assert (origin["reuse"] == "top_layer", origin["approximate"]) == (given, given)


def test_an_ordinary_models_client_is_told_why_it_is_refused(engine: Any) -> None:
    with TestClient(create_app(ServerSettings(max_new_tokens=8), engine)) as client:
        body = {"model": "docs-lm", "prompt": PROMPT, "max_tokens": 4, "dejakv": {"reuse": "top_layer"}}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "every layer attends to its own KV" in answer.text
        body["dejakv"] = {"reuse": "top"}
        assert client.post("/v1/completions", json=body).status_code == 400


def test_a_server_without_approximate_reuse_refuses_it(condensed: Any) -> None:
    with pytest.raises(ConfigError, match="reuse=top_layer is approximate"):
        ServerSettings(reuse="top_layer", allow_approximate=False)
    exact = ServerSettings(model="docs-lckv", allow_approximate=False, max_new_tokens=8)
    with TestClient(create_app(exact, condensed)) as client:
        body = {"prompt": PROMPT, "max_tokens": 4, "dejakv": {"reuse": "top_layer"}}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, "only exact reuse" in answer.text) == (400, True)
