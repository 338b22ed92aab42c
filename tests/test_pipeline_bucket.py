"""One cache of several machines: what one computed, another's requests are served from."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import DOCUMENT, request, uncached, wordings
from tests.documents import EXACT as FAST
from typer.testing import CliRunner

import dejakv
from dejakv.build import build_cache
from dejakv.cli.main import typer_app
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.pipeline import Pipeline
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv_models.docs import ask

pytestmark = pytest.mark.slow  # with real services
EXACT = replace(FAST, costs=(1.0, 0.0, 0.0, 0.0))
"""A read from the bucket is worth its time however busy the machine is."""


def test_a_machine_serves_what_another_computed(docs_engine: Any, bucket: str) -> None:
    """The equal prompt, the beginning of another, and a blend from donors that the other stored."""
    asked, other = request(wordings()[0]), request(ask(DOCUMENT.facts[5], random.Random(5)))
    config = replace(EXACT, store=bucket)
    with closing(build_cache(config, docs_engine)) as one, closing(build_cache(config, docs_engine)) as two:
        assert Pipeline(docs_engine, one).answer(asked).record.method == "none"
        one.flush()
        assert two.store.catch_up()
        hit, prefix = (Pipeline(docs_engine, two).answer(wanted) for wanted in (asked, other))
    assert (hit.record.method, hit.record.level, hit.record.computed_tokens) == ("exact", "exact_text", 1)
    assert (prefix.record.method, prefix.record.level) == ("prefix", "prefix")
    for wanted, answer in ((asked, hit), (other, prefix)):
        assert answer.token_ids == uncached(docs_engine, wanted).token_ids
    blending = replace(config, reuse="blend", semantic_text=False, exact_prefix=False)
    with closing(build_cache(blending, docs_engine)) as third:
        third.flush()
        answer = Pipeline(docs_engine, third).answer(request(ask(DOCUMENT.facts[7], random.Random(7))))
    assert (answer.record.method, answer.record.level) == ("blend", "copied")


def test_attach_and_the_server_open_a_bucket(docs_engine: Any, bucket: str) -> None:
    inputs = docs_engine.tokenizer("what is stored in a bucket is found by every machine", return_tensors="pt")
    said = []
    for _ in range(2):
        records: list[Any] = []
        config = dejakv.SemanticCacheConfig(store=bucket, costs=EXACT.costs, index_encoder="model")
        with dejakv.attach(docs_engine.model, docs_engine.tokenizer, config, on_record=records.append):
            said.append(docs_engine.model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist())
    assert said[0] == said[1]
    assert records[0].method == "exact"
    prompt = {"prompt": request(wordings()[0]).prompt, "max_new_tokens": 4}
    for wanted in ("none", "exact"):
        settings = ServerSettings(store=f"{bucket}/served", costs=EXACT.costs, semantic_text=False)
        with TestClient(create_app(settings, docs_engine)) as client:
            answer = client.post("/v1/generate", json=prompt).json()
        assert wanted in json.dumps(answer), answer


def test_the_commands_look_after_a_bucket(
    docs_engine: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who may only read sees it, and an address without a cache is told, and left as it is."""
    config = replace(EXACT, store=bucket)
    with closing(build_cache(config, docs_engine)) as cache:
        Pipeline(docs_engine, cache).answer(request(wordings()[0]))

    def run(*words: str) -> str:
        done = CliRunner().invoke(typer_app, ["cache", *words])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    def refused(*words: str) -> str:
        done = CliRunner().invoke(typer_app, ["cache", *words])
        return str(done.exception)

    with monkeypatch.context() as reader:
        reader.setenv("AWS_ACCESS_KEY_ID", "reader")
        assert "1 prompt, " in run("show", bucket)
    assert run("purge", "--store", bucket, "--all").startswith("removed 1 prompt, ")
    assert "0 prompts, " in run("show", bucket)
    for words in (["show", f"{bucket}-typo"], ["purge", "--all", "--store", f"{bucket}-typo"]):
        for _ in range(2):
            assert f"{bucket}-typo holds no cache" in refused(*words)
    (tmp_path / "cache").mkdir()
    feed = ["--feed", "redis://127.0.0.1:1/0"]
    assert "is of a bucket" in refused("purge", "--all", "--store", str(tmp_path / "cache"), *feed)


@pytest.mark.parametrize("former", ["cache_dir", "store_dir"])
def test_former_names_of_the_setting_still_do(former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if former == "store_dir":
        settings = ConnectorSettings.from_extra({"store_dir": str(tmp_path)})
        assert settings.cache_config().store == settings.store == str(tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    assert dejakv.SemanticCacheConfig.from_dict({"cache_dir": "x"}).store == "x"
    assert replace(dejakv.SemanticCacheConfig(cache_dir="x"), ttl=1.0).store == "x"
    monkeypatch.setenv("DEJAKV_CACHE_DIR", "y")
    assert ServerSettings.read().store == "y"
    monkeypatch.setenv("DEJAKV_STORE", "z")
    assert ServerSettings.read().store == "z"
