"""Classes and methods of the documents, called as they are written there."""

from typing import Any

import numpy as np
import torch
from tests.documents import request
from tests.prototypes.conftest import Names
from tests.test_fusing import Provider
from tests.tiny_models import begun

from dejakv import (
    EmbeddingCache,
    ExactTextCache,
    FusionCache,
    FusionState,
    LRUCacheStore,
    LSHIndex,
    PrunableDynamicCache,
    SemanticCacheConfig,
    SemanticTextCache,
    open_store,
)
from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes import CacheHit, EmbeddingMatch, KVChunk, ReuseReport, SemanticTextMatch
from dejakv.prototypes.fusion import FusionProvider
from dejakv.prototypes.token_store import CacheItem, make_item


class Words:
    """An encoder of two words that mean the same."""

    fingerprint = "words"

    def encode(self, text: str) -> np.ndarray:
        return np.array([1.0, 0.1 if "car" in text else 0.3, 0.0], dtype=np.float32)


def test_levels() -> None:
    names = Names("levels")
    exact_cache = ExactTextCache()
    exact_cache.record("What color is the car?", "chunk_abc123")
    normalized = exact_cache.normalize("what color  is the car?")
    assert exact_cache.candidates(normalized) == ["chunk_abc123"]
    names("ExactTextCache", "exact_cache.normalize", "exact_cache.candidates", "exact_cache.record")
    semantic_cache = SemanticTextCache(Words(), 0.85)  # type: ignore[arg-type]
    semantic_cache.add("chunk_def456", "What color is the vehicle?")
    match = semantic_cache.search("What color is the car?")
    assert isinstance(match, SemanticTextMatch)
    assert (match.chunk_id, match.layer) == ("chunk_def456", "")
    assert 0.85 <= match.score < 1
    names(
        "SemanticTextCache", "semantic_cache.search", "semantic_cache.add", "SemanticTextMatch", ".chunk_id", ".score"
    )
    embedding_cache = EmbeddingCache(["vision:4:0.85", "prompt:2:0.85"])
    stored = {"vision": np.array([0.1, 0.2, 0.3, 0.9]), "prompt": np.array([0.3, 0.4])}
    embedding_cache.add("chunk_ghi789", stored)
    embed_match = embedding_cache.search(
        {"vision": np.array([0.11, 0.19, 0.3, 0.91]), "prompt": np.array([0.31, 0.39])}
    )
    assert isinstance(embed_match, EmbeddingMatch)
    assert (embed_match.chunk_id, embed_match.layer in embedding_cache.layers) == ("chunk_ghi789", True)
    assert embedding_cache.search({"vision": -stored["vision"], "prompt": stored["prompt"]}) is None
    names("EmbeddingCache", "embedding_cache.search", "embedding_cache.add", "EmbeddingMatch", ".layer")
    names("embedding_cache.layers")
    names.done()


def test_reuse(served: Any) -> None:
    names = Names("reuse")
    pipeline = served(SemanticCacheConfig(index_encoder="model"))
    engine, cache = pipeline.engine, pipeline.cache
    prepared = engine.prepare(request("Where does Ann live?"))
    prepared = type(prepared)(prepared.request, prepared.token_ids, prepared.spans, prepared.inputs, engine.epoch)
    decision = cache.find(prepared)
    report = ReuseReport.of(decision)
    assert (report.hit, report.statuses["kv_cache"]) == (None, "miss")
    completion = engine.run(prepared)
    assert cache.keep(prepared, decision, decision.plan, completion)
    captured = completion.capture()
    found = cache.find(prepared)
    report = ReuseReport.of(found)
    assert isinstance(report.hit, CacheHit)
    assert report.statuses["kv_cache"] == "hit"
    stored = cache.store.get(report.hit.chunk_id)
    chunk = KVChunk(stored)
    assert (chunk.chunk_id, chunk.num_tokens) == (report.hit.chunk_id, len(prepared.token_ids))
    assert chunk.tensors["layer_0"].shape == (2, *captured.shape[2:])
    assert len(chunk.tensors) == captured.shape[1]
    again = begun(engine, prepared, stored, chunk.num_tokens - 1)
    assert (again.token_ids, again.computed_tokens) == (completion.token_ids, 1)
    assert cache.store.put(stored)
    names.having(chunk, "KVChunk.")
    names.having(report, "ReuseReport.")
    names("semantic_cache.try_reuse", "ReuseReport", "CacheHit", "cache.add_observation", "KVChunk")
    names("kv_store.load", "kv_store.save", "adapter.inject", "adapter.capture")
    names.done()


def test_fusion(tmp_path: Any) -> None:
    names = Names("fusion")
    config = SemanticCacheConfig(enable_fusion_cache=True, fusion_cache_dir=str(tmp_path / "fusion"))
    assert config.enable_fusion_cache
    provider: FusionProvider = Provider()
    fusion_cache = FusionCache(provider, open_store(), "model")

    class Llm:
        model = "a model"

    assert fusion_cache.capture(llm=Llm, request_id="a", chunk_id="chunk_jkl012")
    fusion_state = fusion_cache.load("chunk_jkl012")
    assert isinstance(fusion_state, FusionState)
    assert fusion_state.chunk_id == "chunk_jkl012"
    assert "fusion_output" in fusion_state.tensors
    assert fusion_cache.inject(llm=Llm, request_id="b", state=fusion_state) == "hit"
    names.having(fusion_state, "FusionState.")
    names("SemanticCacheConfig.enable_fusion_cache", "fusion_cache_dir", "FusionProvider", "FusionCache", "FusionState")
    names("fusion_cache.load", "fusion_cache.inject", "fusion_cache.capture")
    names.done()


def test_statuses(served: Any) -> None:
    names = Names("statuses")
    pipeline = served(
        SemanticCacheConfig(
            index_encoder="model", embedding_layers=("vision:3:0.9",), embedding_hook=f"{__name__}:no_vision"
        )
    )
    first = pipeline.answer(request("Where does Ann live?")).record
    second = pipeline.answer(request("Where does Ann live?")).record
    assert first.statuses == {
        "exact_text": "miss", "embedding:vision": "skip", "semantic_text": "miss", "kv_cache": "miss",
    }  # fmt: skip
    assert second.statuses == {
        "exact_text": "hit", "embedding:vision": "skip", "semantic_text": "skip", "kv_cache": "hit",
    }  # fmt: skip
    names(*(f'statuses["{name}"]' for name in second.statuses))
    names.done()


def no_vision(*, llm: Any, sample: Any) -> dict[str, Any]:
    """A hook for requests without a picture."""
    return {}


def test_token_store(docs_engine: Any) -> None:
    names = Names("token_store")
    store = LRUCacheStore(max_items=1)
    items: list[CacheItem] = []
    for question in ("Where does Ann live?", "Where does Bob work?"):
        prepared = docs_engine.prepare(request(question))
        items.append(make_item(docs_engine, prepared, docs_engine.run(prepared).capture()))
        key = store.put(items[-1])
        assert store.get(key) is not None
    assert [item.key for item in store.items()] == [items[1].key]
    names("LRUCacheStore", "LRUCacheStore.put", "LRUCacheStore.get", "LRUCacheStore.items", "CacheItem")
    names.done()


def test_prune(docs_engine: Any) -> None:
    names = Names("prune")
    ids = torch.tensor([docs_engine.prepare(request("Where does Ann live?")).token_ids])
    cache = PrunableDynamicCache.prefill(docs_engine.model, ids)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    assert docs_engine.model.generate(ids, **{CACHE_NAME: cache}, **given).shape[1] > ids.shape[1]
    assert cache.nbytes < cache.full_bytes
    names("PrunableDynamicCache")
    names.done()


def test_lsh() -> None:
    names = Names("lsh")
    index = LSHIndex(embedding_dim=8, num_hyperplanes=16, seed=42)
    rows = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    hashes = index.compute_hash_batch(torch.from_numpy(rows))
    assert hashes == [index.compute_hash(row) for row in rows]
    assert hashes == LSHIndex(8).compute_hash_batch(rows)  # the defaults are the document's
    assert all(set(text) <= {"0", "1"} and len(text) == 16 for text in hashes)
    assert hashes != LSHIndex(8, seed=43).compute_hash_batch(rows)
    names(
        "LSHIndex", "LSHIndex.compute_hash", "LSHIndex.compute_hash_batch", "embedding_dim", "num_hyperplanes", "seed"
    )
    names.done()
