"""Whatever is wrong with the store below a real engine: every request is answered, or the start fails with the reason."""

from pathlib import Path

import pytest
from vllm_harness import BLENDING, running, segments, spoil, tokens

from dejakv.errors import ConfigError, StoreError
from dejakv.experiments.vllm_engine import KV_CONNECTOR

A = tokens(501, 51)


def test_multi_connector_survives_damage(tmp_path: Path) -> None:
    """Below vLLM's MultiConnector, whose own default fails a request when its state cannot be read."""
    extra = {"store_dir": str(tmp_path), "memory_bytes": 0, "lookup_timeout_s": 30}
    with running(multi=[{**KV_CONNECTOR, "kv_connector_extra_config": extra}]) as engine:
        (truth,) = engine.ask([A], max_tokens=8)
        method = "none"
        while method != "exact":  # it is stored behind the answer
            engine.reset_prefix_cache()
            method = engine.ask([A], wish={"no_store": True})[0].told["method"]
        for path in segments(tmp_path):
            spoil(path)
        engine.reset_prefix_cache()
        (damaged,) = engine.ask([A], max_tokens=8)
        assert damaged.tokens == truth.tokens
        assert "cannot be read" in damaged.told["reason"]


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_beside_a_connector_of_vllm(tmp_path: Path, first: str) -> None:
    """Whichever stands first serves; answers are those of full computation either way."""
    extra = {"store_dir": str(tmp_path / "ours"), "lookup_timeout_s": 30}
    ours = {**KV_CONNECTOR, "kv_connector_extra_config": extra}
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "theirs")},
    }
    with running(multi=[ours, theirs] if first == "ours" else [theirs, ours]) as engine:
        (truth,) = engine.ask([A], max_tokens=8)
        assert any((tmp_path / "theirs").iterdir())
        expected, method = "exact" if first == "ours" else "none", ""
        while method != expected:  # ours stores behind the answer
            engine.reset_prefix_cache()
            (again,) = engine.ask([A], max_tokens=8, wish={"no_store": True})
            assert again.tokens == truth.tokens
            method = again.told["method"]
        assert again.cached > 0


@pytest.mark.parametrize(
    ("extra", "policy", "words"),
    [
        ({}, "fail", 'add "kv_load_failure_policy": "recompute" beside'),
        (BLENDING, "recompute", "blend below MultiConnector"),
    ],
)
def test_multi_connector_is_set_for_us_or_refused(extra: dict[str, object], policy: str, words: str) -> None:
    """Its policy is the other connectors' too, so that it is not ours to change."""
    multi = [{**KV_CONNECTOR, "kv_connector_extra_config": extra}]
    with pytest.raises(ConfigError, match=words), running(multi=multi, policy=policy):
        pass


def test_bad_settings_stop_the_start(tmp_path: Path) -> None:
    """A clear error before any request."""
    with pytest.raises(ConfigError, match="unknown key 'stores'"), running(extra={"stores": "x"}):
        pass
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises((StoreError, ConfigError)), running(extra={"store_dir": str(file / "below")}):
        pass
