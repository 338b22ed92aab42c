"""A wrapped exact connector, shown with vLLM's example disk connector: it first, ours when it has nothing, no poison in it."""

import pytest
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.errors import ConfigError

A = tokens(330, 71)  # its key is of whole blocks before the last token
B = changed(A, 0.1, 72)


def _files(folder):
    return {path.parent.name for path in folder.rglob("*.safetensors")}


def test_inner_connector(tmp_path):
    inner = tmp_path / "inner"
    extra = {
        **BLENDING,
        "inner": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(inner)},
        },
    }
    options = {"worker_extension_cls": EXTENSION, "disable_hybrid_kv_cache_manager": True}
    with running(connector=False) as engine:
        truth = {name: engine.ask([prompt])[0].tokens for name, prompt in {"A": A, "B": B}.items()}
    with running(extra=extra, **options) as engine:
        (first,) = engine.ask([A])
        engine.settle()
        assert first.tokens == truth["A"]
        held = _files(inner)
        assert len(held) == 1

        engine.reset_prefix_cache()
        (again,) = engine.ask([A])
        assert again.told["level"] == "inner"
        assert again.cached >= 288
        assert again.tokens == truth["A"]

        (blended,) = engine.ask([B], wish={"mode": "blend"})
        assert blended.told["method"] == "blend"
        assert _files(inner) == held, "the inner connector must not see a blended request"

        (salted,) = engine.ask([A], salt="tenant")
        assert salted.told["method"] == "none"
        assert salted.tokens == truth["A"]
        assert _files(inner) == held, "it does not key by cache_salt, so it must not see salted requests"
        engine.settle()
        engine.reset_prefix_cache()
        (ours,) = engine.ask([A], salt="tenant")
        assert ours.told["level"] == "exact_text"

        (exact,) = engine.ask([B])
        assert exact.tokens == truth["B"]
        assert len(_files(inner)) == 2
        assert worker_side().paged is not None


def test_unknown_inner_connector():
    with (
        pytest.raises(ConfigError, match="inner connector 'Nobody'"),
        running(extra={"inner": {"kv_connector": "Nobody"}}),
    ):
        pass
