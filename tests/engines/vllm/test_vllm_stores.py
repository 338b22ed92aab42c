"""The stores behind the two sides of a connector, without an engine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.encoder_connector import EncoderSettings
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.stores import EveryRank, open_store
from dejakv.errors import ConfigError
from dejakv.experiments.vllm_engine import connector_settings
from dejakv.store.age import now
from dejakv.store.base import Chunk
from dejakv.testing.chunks import prompt_chunk
from dejakv.testing.stores import Ahead

VLLM: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(distributed_executor_backend=None),
    kv_transfer_config=SimpleNamespace(engine_id="stores"),
)


def living(tokens: range, *, seconds: float) -> Chunk:
    """A prompt that may be used for so many seconds more, or that has expired so long ago."""
    chunk = prompt_chunk(tokens)
    return replace(chunk, meta=replace(chunk.meta, created=now() - 1_000, ttl=1_000 + seconds))


@pytest.mark.parametrize("on_disk", [False, True])
def test_both_sides_find_nothing_that_has_expired(tmp_path, on_disk: bool) -> None:
    settings = ConnectorSettings(store_dir=str(tmp_path / "s") if on_disk else None)
    theirs, ours = open_store(settings, VLLM, writing=True), open_store(settings, VLLM)
    old, new = living(range(50), seconds=-1), living(range(100, 150), seconds=500)
    try:
        for chunk in (old, new):
            assert theirs.put(chunk)
        view = EveryRank([ours])
        for side in (theirs, ours, view):
            assert [meta.id for meta in side.metas()] == [new.meta.id]
            assert side.meta(old.meta.id) is None
            assert [meta.id for meta in side.added()[0]] == [new.meta.id]
    finally:
        ours.close()
        theirs.close()


def test_a_lifetime_is_set_for_all_and_shortened_by_a_request() -> None:
    settings = ConnectorSettings.from_extra({"ttl": 60})
    assert settings.cache_config().ttl == 60
    assert ConnectorSettings().cache_config().ttl == 0
    assert Wish.of({"dejakv": {"ttl": 5}}, settings).ttl == 5.0
    for wrong in (0, -1, True, "5", float("inf"), float("nan"), 10**400):
        assert "ttl" in Wish.of({"dejakv": {"ttl": wrong}}, settings).problem
    assert EncoderSettings.from_extra({"ttl": 60}).ttl == 60
    with pytest.raises(ConfigError, match="ttl"):
        ConnectorSettings.from_extra({"ttl": -1})


def test_encoder_outputs_expire_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ahead()
    monkeypatch.setattr("dejakv.encoder_cache.encode_once.clock", clock)
    view = EncoderSettings.from_extra({"ttl": 60}).open().view("e", "p")
    content = "a" * 64
    view.store(content, "image", np.ones((2, 3), np.float32))
    assert view.lookup(content) is not None
    clock.seconds = 61
    assert view.lookup(content) is None


def test_a_run_on_vllm_keeps_state_no_longer_than_it_is_told_to() -> None:
    assert connector_settings(SemanticCacheConfig(ttl=60)).ttl == 60
    assert connector_settings(SemanticCacheConfig(ttl=60, ttl_prompts=5)).ttl == 5
