"""The OpenAI server in processes of its own: the flags, the middleware, what the client is told, and /metrics."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.services import wait_until
from vllm_harness import DOCS, running, server_flags, serving

from dejakv.cli.explain import explain_request
from dejakv.engines.vllm.stats import METRICS
from dejakv.http.keys import ApiKeys

ROOT = Path(__file__).parents[3]

DOCUMENT = "mara lives in rome. olga lives in oslo. " * 8
FIRST = f"{DOCUMENT}where does mara live?"
NEAR = f"{DOCUMENT}and where does mara live?"


NO_STORE = {"dejakv": {"no_store": True}}
STORE = "s3://dejakv/servers"


@pytest.fixture(scope="module")
def server(tmp_path_factory, s3_server):
    folder = tmp_path_factory.mktemp("server")
    adopt = {"index_encoder": "model", "model": str(DOCS), "similarity_threshold": 0.9, "lexical_guard": False}
    environment = {"DEJAKV_ADOPT": json.dumps(adopt), "DEJAKV_API_KEYS": "one,two"}
    environment |= s3_server.environment
    flags = [*server_flags({"store": STORE, "disk_dir": str(folder / "kv")}), "--scheduling-policy", "priority"]
    with serving(folder, flags, environment) as address:
        yield address


def _complete(server, prompt, key="one", cache_control="", **more):
    body = {"model": "docs", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    headers = {"authorization": f"Bearer {key}", "cache-control": cache_control}
    answer = httpx.post(f"{server}/v1/completions", json=body, headers=headers, timeout=None)
    assert answer.status_code == 200, answer.text
    told = answer.json().get("kv_transfer_params")
    told = told and told["dejakv"]
    return answer.json()["choices"][0]["text"], answer.headers, told


def test_series_are_there_before_the_first_request(server):
    """A rate needs a value before the first event: an alert would not see what never happened before."""
    samples = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{server}/metrics", timeout=None).text.splitlines()
        if line.startswith("vllm:dejakv_") and "_created{" not in line
    }
    assert {name.partition("{")[0] for name in samples} == {f"vllm:dejakv_{name}_total" for name in METRICS}
    assert set(samples.values()) == {0}
    results = {re.search(r'found="(\w+)"', name)[1] for name in samples if "_lookups_total" in name}
    assert results == {"exact", "blend", "miss"}


def test_server(server):
    """Adopt, its provenance and its partitions over HTTP; the connector's own word in the body; figures on /metrics."""
    text, headers, told = _complete(server, FIRST)
    assert headers["x-dejakv-method"] == "none"
    assert told is None, "nobody asked"
    _, _, told = _complete(server, FIRST, kv_transfer_params={"dejakv": {}})
    assert told["method"] in ("none", "exact"), "it may be stored by now"
    headers = {"x-dejakv-method": "none"}
    while headers["x-dejakv-method"] == "none":  # a prompt becomes a donor after its answer is out
        adopted, headers, _ = _complete(server, NEAR, cache_control="no-store")
    assert headers["x-dejakv-method"] == "adopt", headers.get("x-dejakv-reason")
    assert headers["x-dejakv-level"] == "semantic_text"
    assert adopted == text
    _, headers, _ = _complete(server, NEAR, key="two")
    assert headers["x-dejakv-method"] == "none"
    assert (
        httpx.post(f"{server}/v1/completions", json={"model": "docs", "prompt": "x"}, timeout=None).status_code == 401
    )

    _, _, told = _complete(server, FIRST, kv_transfer_params={"dejakv": {"mode": "fuzzy"}})
    assert told["method"] == "none"
    assert told["reason"].startswith("unknown mode")
    metrics = httpx.get(f"{server}/metrics", timeout=None).text
    board = json.loads((ROOT / "docs/grafana/dejakv-vllm.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name.removesuffix("_bucket") for target in targets for name in re.findall(r"vllm:\w+", target)}
    assert not {name for name in used if f"# TYPE {name} " not in metrics}
    assert {f"vllm:dejakv_{name}_total" for name in METRICS} <= used, "the board leaves nothing out"
    assert all(target.count("(") == target.count(")") for target in targets)
    lookups = [line for line in metrics.splitlines() if line.startswith("vllm:dejakv_lookups_total")]
    assert lookups
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lookups) >= 3


def test_a_request_is_explained(server, tmp_path):
    """Why nothing is reused, then what is, without storing what was asked."""
    (tmp_path / "request.json").write_text(json.dumps({"prompt": FIRST.replace("mara", "dana"), "stream": True}))
    said = [explain_request(server, str(tmp_path / "request.json"), "two") for _ in range(2)]
    assert all(each.startswith("Nothing was reused for ") for each in said), said
    _complete(server, FIRST.replace("mara", "dana"), key="two")
    while said[-1].startswith("Nothing was reused"):  # it is stored behind its answer
        said.append(explain_request(server, str(tmp_path / "request.json"), "two"))
    assert "the answer is that of full computation" in said[-1]


def test_a_client_settles_prompts(server):
    """examples/vllm_settle.py, behind whoever comes meanwhile, on prompts of which nothing is stored."""
    unkept, kept = FIRST.replace("mara", "nina"), FIRST.replace("mara", "hugo")
    bodies = [{"model": "docs", "prompt": prompt, "max_tokens": 40, "stream": True} for prompt in (unkept, kept)]
    bodies[0]["kv_transfer_params"] = NO_STORE
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_settle.py"), server, "--priority", "1"],
        input="\n".join(map(json.dumps, bodies)),
        env={**os.environ, "DEJAKV_API_KEY": "one"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "settled 1\n", done.stderr
    told = {"method": "none"}
    while told["method"] != "exact":  # it is stored behind its answer
        _, _, told = _complete(server, kept, kv_transfer_params=NO_STORE)
    assert _complete(server, unkept, kv_transfer_params=NO_STORE)[2]["method"] == "none"


def test_another_engine_has_what_the_server_computed(server, s3_server, monkeypatch):
    """On one bucket: an exact hit, and a blend from donors that the server stored."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    head = [f"{name} lives in {place}. " * 30 for name, place in (("mara", "rome"), ("olga", "oslo"))]
    texts = _complete(server, head[0], key="two")[0], _complete(server, head[1], key="two")[0]
    extra = {"store": STORE, "modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "refresh_s": 0.1}
    with running(extra=extra) as engine:
        tokenizer = engine.llm.get_tokenizer()
        ids = [tokenizer.encode(text) for text in head]
        store = engine.connector.scheduler_side.lookups.cache.store

        def stored():
            return [meta for meta in store.metas() if list(meta.token_ids) in ids]

        wait_until(lambda: len(stored()) == 2, "the server's prompts")
        salt = ApiKeys(["two"]).caller("two").partition
        hits = [engine.ask([prompt], salt=salt, wish={"no_store": True}, max_tokens=4)[0] for prompt in ids]
        assert [hit.told["method"] for hit in hits] == ["exact"] * 2, hits[0].told["reason"]
        assert [hit.text for hit in hits] == list(texts)
        donors = [meta.id for meta in stored()]
        moved = ids[1][40:120] + ids[0][20:100] + tokenizer.encode("where does olga live?")
        (blend,) = engine.ask([moved], salt=salt, wish={"mode": "blend", "donors": donors, "no_store": True})
        assert (blend.told["method"], set(blend.told["donors"]) <= set(donors)) == ("blend", True), blend.told["reason"]
        assert blend.told["tokens_reused"] > 0
