"""A user's fusion provider by its name in the settings: captured on a miss, put back on a hit, kept over restarts."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.documents import request

from dejakv import open_store
from dejakv.build import build_cache, build_fusion
from dejakv.config import SemanticCacheConfig
from dejakv.engines.open import state_places
from dejakv.errors import ConfigError
from dejakv.pipeline import Pipeline
from dejakv.prototypes.fusion import FusionCache, FusionState
from dejakv.request import Prepared, Request
from dejakv.store.selection import Selection

QUESTION = "Where does Ann live?"
CALLS: list[tuple[str, str]] = []


class Provider:
    """Stands for a projector of whose output a state is made; it notes what it is asked."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
        assert llm.model is not None
        CALLS.append(("capture", chunk_id))
        return FusionState(chunk_id, {"fusion_output": np.full((2, 3), 7, np.float32)})

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        assert np.array_equal(state.tensors["fusion_output"], np.full((2, 3), 7, np.float32))
        CALLS.append(("inject", state.chunk_id))
        return True


class Broken(Provider):
    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
        raise RuntimeError("no projector")


def config(name: str = "Provider", **more: Any) -> SemanticCacheConfig:
    return SemanticCacheConfig(fusion_provider=f"{__name__}:{name}", index_encoder="model", **more)


@pytest.fixture(autouse=True)
def _named() -> Any:
    CALLS.clear()
    sys.modules.setdefault(__name__, sys.modules[__name__])


def test_a_miss_is_captured_and_a_hit_is_put_back(served: Any) -> None:
    pipeline = served(config())
    first = pipeline.answer(request(QUESTION)).record
    assert (first.statuses["fusion"], CALLS) == ("miss", [("capture", first.key)])
    second = pipeline.answer(request(QUESTION)).record
    assert (second.method, second.statuses["fusion"]) == ("exact", "hit")
    assert [("capture", first.key), ("inject", first.key)] == CALLS


def test_states_survive_a_restart_in_the_folder(docs_engine: Any, tmp_path: Path) -> None:
    folders = {"cache_dir": str(tmp_path / "kv"), "fusion_cache_dir": str(tmp_path / "fusion")}
    for wanted in ("miss", "hit"):
        cache = build_cache(config(**folders), docs_engine, background=False)
        record = Pipeline(docs_engine, cache).answer(request(QUESTION)).record
        cache.close()
        assert record.statuses["fusion"] == wanted
    assert set(state_places("transformers", config(**folders))) == {*folders.values(), str(tmp_path / "fusion-states")}
    assert (tmp_path / "fusion-states").is_dir()


def test_a_purge_takes_the_states_of_its_own_partition_alone(docs_engine: Any, tmp_path: Path) -> None:
    folders = {"cache_dir": str(tmp_path / "kv"), "fusion_cache_dir": str(tmp_path / "fusion")}
    cache = build_cache(config(**folders), docs_engine, background=False)
    pipeline = Pipeline(docs_engine, cache)
    for partition in "ab":
        assert pipeline.answer(request(QUESTION, partition=partition)).record.statuses["fusion"] == "miss"
    pipeline.purge(Selection("a"))
    assert pipeline.answer(request(QUESTION, partition="b")).record.statuses["fusion"] == "hit"
    cache.close()
    with closing(open_store(tmp_path / "fusion-states")) as kept:
        assert {meta.partition for meta in kept.metas()} == {"b"}


@pytest.mark.parametrize("partitions", [1, 2])
def test_states_in_memory_have_a_budget_of_their_own_that_partitions_divide(partitions: int) -> None:
    fusing = build_fusion(config(encoder_bytes=8000, partitions=partitions), None)
    assert fusing is not None

    def cache(partition: str) -> FusionCache:
        return fusing._of(Prepared(Request("r", "x", "x", partition=partition), (1, 2), epoch="e"))

    names = [str(number) for number in range(9)]
    for partition in "ba":
        for name in names[: 1 if partition == "b" else 9]:
            assert cache(partition).save(FusionState(name, {"rows": np.ones((10, 20), np.float32)}))
    held = [name for name in names if cache("a").load(name) is not None]
    assert held
    assert held == names[-len(held) :]
    assert len(held) * 800 <= 8000 / partitions
    assert (cache("b").load("0") is not None) == (partitions == 2)


def test_a_provider_that_fails_costs_nothing_but_its_states(served: Any) -> None:
    pipeline = served(config("Broken"))
    for wanted in ("none", "exact"):
        record = pipeline.answer(request(QUESTION)).record
        assert (record.method, record.statuses["fusion"]) == (wanted, "miss")


@pytest.mark.parametrize(("name", "says"), [("no.such:thing", "does not import"), ("builtins:dict", "has no capture")])
def test_mistakes(docs_engine: Any, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--fusion-provider.*{says}"):
        build_cache(SemanticCacheConfig(fusion_provider=name, semantic_text=False), docs_engine)
