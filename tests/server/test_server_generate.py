"""SemShareKV's endpoint and the cache's, over the bundled documents model."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.serving import stored

from dejakv.errors import ConfigError
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv.store.counters import FAILED_WRITES
from dejakv_models.docs import edit, make_document, prompt_of

ROOT = Path(__file__).parents[2]
RNG = random.Random(5)
DOCUMENT = make_document(RNG, facts=24)
EDITED = edit(DOCUMENT, RNG, facts=1)
FACT = DOCUMENT.facts[0]
QUESTION = EDITED.questions[0].text
PROMPT = prompt_of(DOCUMENT.text, QUESTION)
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def generate(client: TestClient, prompt: str = PROMPT, key: str | None = None, **more: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = client.post("/v1/generate", json={"prompt": prompt, **GREEDY, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    stored(client)
    return answer.json()


def test_the_second_time_is_exact_and_equal(client: TestClient) -> None:
    first, second = generate(client), generate(client)
    assert (first["cache_hit"], first["used_semshare"], first["ref_key"]) == (False, False, None)
    assert first["store_key"].startswith("p")
    assert (second["cache_hit"], second["reuse"], second["tokens_computed"]) == (True, "exact", 1)
    assert second["text"] == first["text"]
    assert second["ref_key"] == first["store_key"]
    assert set(second["timings"]) == {"ttft_ms", "latency_ms", "lookup_ms", "inject_ms"}


def test_a_similar_prompt_is_blended_and_never_stored_as_exact(client: TestClient) -> None:
    base = generate(client)
    similar = prompt_of(EDITED.target.text, QUESTION)
    blended = generate(client, similar, use_semshare=True)
    assert (blended["used_semshare"], blended["reuse"], blended["store_key"]) == (True, "blend", None)
    assert blended["ref_key"] == base["store_key"]
    assert 0.8 <= blended["retrieved_sim"] <= 1.0
    assert 0 < blended["tokens_computed"] < blended["tokens_computed"] + blended["tokens_reused"]
    plain = generate(client, similar)
    assert plain["reuse"] in ("none", "prefix")
    assert plain["store_key"] is not None
    assert generate(client, similar, use_semshare=True)["reuse"] == "exact"


def test_the_operator_may_switch_similar_prompts_on_or_forbid_them(engine: Any) -> None:
    similar = prompt_of(EDITED.target.text, QUESTION)
    with TestClient(create_app(ServerSettings(reuse="blend", costs=COSTS), engine)) as client:
        generate(client)
        assert not generate(client, similar, use_semshare=False)["used_semshare"]
    with TestClient(create_app(ServerSettings(reuse="blend", costs=COSTS), engine)) as client:
        generate(client)
        assert generate(client, similar)["reuse"] == "blend"
    with TestClient(create_app(ServerSettings(allow_approximate=False), engine)) as client:
        for path, body in (
            ("/v1/generate", {"use_semshare": True}),
            ("/v1/completions", {"dejakv": {"reuse": "adopt"}}),
            ("/v1/completions", {"dejakv": {"reuse": "blend"}}),
        ):
            answer = client.post(path, json={"prompt": similar, **body})
            assert answer.status_code == 400
            assert "DEJAKV_ALLOW_APPROXIMATE" in answer.json()["error"]["message"]
    with TestClient(create_app(ServerSettings(), engine)) as client:
        answer = client.post("/v1/completions", json={"prompt": similar, "dejakv": {"reuse": "top_layer"}})
        assert (answer.status_code, "every layer attends to its own KV" in answer.text) == (400, True)
    with pytest.raises(ConfigError, match="reuse=blend is approximate"):
        ServerSettings(reuse="blend", allow_approximate=False)


def test_blends_are_as_good_as_the_operator_says(engine: Any) -> None:
    """The map alone computes fewer rows of the same prompt."""
    similar = prompt_of(EDITED.target.text, QUESTION)
    computed = []
    for quality in ({}, {"blend_quality": "loose"}, {"blend_share": 0.3}):
        with TestClient(create_app(ServerSettings(**quality, costs=COSTS), engine)) as client:
            generate(client)
            blended = generate(client, similar, use_semshare=True)
            assert blended["reuse"] == "blend"
            computed.append(blended["tokens_computed"])
    default, loose, more = computed
    assert loose < default < more


def test_a_threshold_of_its_own(client: TestClient) -> None:
    generate(client)
    similar = prompt_of(EDITED.target.text, QUESTION)
    assert generate(client, similar, use_semshare=True, sim_threshold=1.0)["reuse"] in ("none", "prefix")
    assert generate(client, similar, sim_threshold=0.0, use_semshare=False)["used_semshare"] is False


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": "   ", "max_new_tokens": 4}, 400, "empty"),
        ({"prompt": "x " * 4000, "max_new_tokens": 4}, 400, "context"),
        ({"prompt": "x", "max_new_tokens": -1}, 422, "max_new_tokens"),
        ({"prompt": "x", "max_new_tokens": 65}, 400, "limit of 64"),
        ({"prompt": "x", "sim_threshold": 1.2}, 422, "sim_threshold"),
        ({"prompt": "x", "temperature": -1}, 422, "temperature"),
        ({"prompt": "x", "store_key": "../../etc"}, 422, "store_key"),
        ({"prompt": "x", "partition": "other"}, 422, "partition"),
        ({}, 422, "prompt"),
    ],
)
def test_bad_bodies(client: TestClient, body: dict[str, Any], status: int, says: str) -> None:
    answer = client.post("/v1/generate", json=body)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def test_health_ready_metrics_and_docs(client: TestClient) -> None:
    generate(client)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json()["status"] == "ready"
    text = client.get("/metrics").text
    assert 'dejakv_server_requests_total{outcome="served"} 1.0' in text
    assert 'dejakv_requests_total{level="",method="none"} 1.0' in text
    assert "dejakv_store_puts_total" in text
    assert "default" not in text.replace("dejakv_", "")
    assert client.get("/docs").status_code == 200


def test_every_series_is_there_before_the_first_request(client: TestClient) -> None:
    """A rate needs a value before the first event: an alert would not see what never happened before."""
    samples = [line for line in client.get("/metrics").text.splitlines() if line.startswith("dejakv_")]
    names = {re.split(r"[{ ]", line)[0] for line in samples}
    page = (ROOT / "docs/reference/metrics.md").read_text()
    counters = set(re.findall(r"`(dejakv_\w+_total)(?:\{[\w,]+\})?`", page))
    elsewhere = {
        name
        for name in counters
        if name.startswith(("dejakv_visual_", "dejakv_dp_", "dejakv_trust_", "dejakv_stabilize_"))
    }
    assert counters - elsewhere <= names
    assert {line for line in samples if "_total" in line and not line.endswith(" 0.0")} == set()
    for name, label, values in (
        ("dejakv_server_requests_total", "outcome", {"served", "refused", "cancelled", "failed"}),
        ("dejakv_store_refused_total", "reason", set(FAILED_WRITES)),
        ("dejakv_store_evictions_total", "reason", {"bytes", "entries", "quota"}),
        ("dejakv_level_hits_total", "level", {"exact_text"}),
        ("dejakv_guard_rejections_total", "guard", {"threshold", "lexical"}),
    ):
        exported = {re.search(rf'{label}="(\w+)"', line)[1] for line in samples if line.startswith(name)}  # pyright: ignore[reportOptionalSubscript]
        assert values <= exported, name


def test_the_operator_has_figures_and_no_partition(engine: Any) -> None:
    with TestClient(create_app(ServerSettings(api_keys="alpha", operator_key="boss"), engine)) as client:
        generate(client, key="alpha")
        own, all = (
            client.get("/v1/cache/stats", headers={"Authorization": f"Bearer {key}"}).json()
            for key in ("alpha", "boss")
        )
        assert (own["entries"], own["bytes"], own["stored"]) == (None, None, 1)
        assert (all["entries"], all["stored"]) == (1, 1)
        answer = client.post("/v1/generate", json={"prompt": "x"}, headers={"Authorization": "Bearer boss"})
        assert answer.status_code == 401
        assert "no partition" in answer.json()["error"]["message"]
