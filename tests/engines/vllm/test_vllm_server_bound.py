"""An error bound over a real server in processes of its own: blends are served once the front's own requests have shown them right."""

import json
import random
import time
from typing import Any

import httpx
import pytest
from vllm_harness import DOCS, serving

from dejakv.datasets.docs import ask, make_document
from dejakv.engines.vllm.launch import server_flags
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.trust.grid import PILOT

RNG = random.Random(7)
DOCUMENTS = [make_document(RNG, facts=5) for _ in range(7)]
SETTINGS = {
    "error_bound": 0.9, "confidence": 0.5, "audit_share": 1.0, "mode": "blend", "semantic_text": False,
    "differs": "said:never",
}  # fmt: skip
KEY = {"authorization": "Bearer one"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bounded")
    connector = ConnectorSettings(store_dir=str(folder / "kv"), modes=("off", "exact", "blend"), min_gain=1)
    environment = {
        "DEJAKV_ADOPT": json.dumps({**SETTINGS, "cache_dir": str(folder / "front")}),
        "DEJAKV_API_KEYS": "one,two",
        "DEJAKV_OPERATOR_KEY": "operator",
    }
    flags = ["--scheduling-policy", "priority", *server_flags(connector)]
    with serving(folder, DOCS, flags, environment) as address:
        yield address


def _prompts():
    """Prompts of two documents each, none twice."""
    pairs = [(one, other) for one in DOCUMENTS for other in DOCUMENTS if one is not other]
    random.Random(1).shuffle(pairs)
    for number, (one, other) in enumerate(pairs):
        yield f"{one.text} {other.text} {ask(other.facts[0], random.Random(number))}"


def _complete(server: str, prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "docs", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{server}/v1/completions", json=body, headers=KEY, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], (answer.json().get("kv_transfer_params") or {}).get("dejakv", {})


def _trust(server: str) -> dict[str, Any]:
    return httpx.get(f"{server}/dejakv/trust", headers={"authorization": "Bearer operator"}, timeout=None).json()


def _labelled(server: str, settled: int) -> dict[str, Any]:
    """What is known once so many labels were made or lost."""
    while True:
        told = _trust(server)
        if told["explored"] + told["audited"] + told["lost"] >= settled:
            return told
        time.sleep(0.2)


def test_blends_are_held_back_until_labels_show_that_they_are_right(server: str) -> None:
    for document in DOCUMENTS:
        _complete(server, f"{document.text} {ask(document.facts[0], random.Random(0))}")
    time.sleep(3)  # their state is stored behind the answers
    prompts = _prompts()
    for _ in range(PILOT):  # they choose the rules
        _, told = _complete(server, next(prompts))
        assert (told["method"], told["approximate"]) in (("none", False), ("exact", False))
        assert told["would"]["donors"], told
    assert _trust(server)["gate"] == "closed"

    known, served, text = _trust(server), "", ""
    for number, prompt in enumerate(prompts, start=1):
        text, told = _complete(server, prompt)
        known = _labelled(server, number)
        assert (known["explored_wrong"], known["wrong"], known["lost"]) == (0, 0, 0)
        if told["approximate"]:
            served = prompt
            break
        assert told["method"] in ("none", "exact")
    assert told["method"] == "blend"
    assert known["gate"] == "open"
    assert (known["served"], known["audited"]) == (1, 1)
    assert known["explored"] >= 1
    again, told = _complete(server, served, kv_transfer_params={"dejakv": {"mode": "exact"}})
    assert not told["approximate"], "the audit's state is vLLM's own and exact"
    assert text
    assert again


def test_another_partition_has_its_own_evidence_and_streams_are_exact(server: str) -> None:
    answer = httpx.post(
        f"{server}/v1/completions",
        json={"model": "docs", "prompt": next(_prompts()), "max_tokens": 4, "stream": True},
        headers=KEY,
        timeout=None,
    )
    assert answer.headers["x-dejakv-reason"].startswith("a stream does not tell")
    assert httpx.get(f"{server}/dejakv/trust", headers=KEY, timeout=None).status_code == 403
