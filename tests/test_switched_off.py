"""`DEJAKV_OFF=1` turns all reuse off: in the library, `attach`, the server and the adopting proxy. (vLLM: contracts/test_serving.py.)"""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import ADOPT, COSTS, request, wordings

import dejakv
from dejakv.adopt import AdoptRequest, PromptAdopter
from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import encoder_registry
from dejakv.errors import ConfigError
from dejakv.pipeline import Pipeline
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

WHY = "switched off: DEJAKV_OFF=1"


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_OFF", "1")


def test_a_pipeline_computes_everything_and_stores_nothing(
    off: None, docs_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = build_cache(ADOPT, docs_engine)
    one, other = wordings()
    records = [Pipeline(docs_engine, cache).answer(request(text)).record for text in (one, one, other)]
    cache.flush()
    assert [(record.method, record.reason, record.stored) for record in records] == [("none", WHY, False)] * 3
    assert all(record.computed_tokens == record.prompt_tokens for record in records)
    assert cache.store.stats().entries == 0
    assert [message for message in caplog.messages if WHY in message] == [f"{WHY}: nothing is reused or stored"]
    cache.close()


def test_what_was_stored_before_is_neither_used_nor_lost(
    docs_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SemanticCacheConfig(cache_dir=str(tmp_path / "store"), semantic_text=False)

    def answered() -> Any:
        cache = build_cache(config, docs_engine)
        record = Pipeline(docs_engine, cache).answer(request(wordings()[0])).record
        cache.close()
        return record.provenance

    before = answered()
    monkeypatch.setenv("DEJAKV_OFF", "1")
    meanwhile = answered()
    monkeypatch.setenv("DEJAKV_OFF", "0")
    assert (before, meanwhile, answered()) == ("miss", "miss", "hit (text:exact)")


def test_attach(off: None, docs_engine: Any) -> None:
    records: list[Any] = []
    model, tokenizer = docs_engine.model, docs_engine.tokenizer
    inputs = tokenizer(wordings()[0], return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**inputs, **options)
    with dejakv.attach(model, tokenizer, on_record=records.append):
        outputs = [model.generate(**inputs, **options) for _ in range(2)]
    assert [(record.method, record.reason) for record in records] == [("none", WHY)] * 2
    assert all(output.equal(plain) for output in outputs)


def test_the_server(off: None, docs_engine: Any) -> None:
    with TestClient(create_app(ServerSettings(costs=COSTS), docs_engine)) as client:
        said = [
            client.post("/v1/generate", json={"prompt": wordings()[0], "max_new_tokens": 4}).json() for _ in range(2)
        ]
    assert [(one["reuse"], one["reason"]) for one in said] == [("none", WHY)] * 2


def test_the_adopter(off: None) -> None:
    adopter = PromptAdopter(SemanticCacheConfig(reuse="adopt", semantic_text=False))
    asked = AdoptRequest("a", "what is the capital of France", "c")
    for _ in range(2):
        text, provenance = adopter.find(asked)
        assert (text, provenance.method, provenance.reason) == (asked.text, "none", WHY)
        adopter.learn(asked, provenance)
    assert len(adopter) == 0


def test_encoder_outputs_are_not_kept(off: None) -> None:
    assert encoder_registry(SemanticCacheConfig()) is None


def test_another_value_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_OFF", "yes please")
    with pytest.raises(ConfigError, match="DEJAKV_OFF=yes please: set it to 1"):
        PromptAdopter(SemanticCacheConfig(reuse="adopt", semantic_text=False))
