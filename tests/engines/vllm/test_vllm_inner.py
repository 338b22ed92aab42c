"""A wrapped exact connector, shown with vLLM's example disk connector: it first, ours when it has nothing, no poison in it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm.connector import DejaKVConnector
from dejakv.engines.vllm.forwarding import Forwarding
from dejakv.engines.vllm.inner import Inner
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


def test_the_whole_interface_is_wrapped():
    """Whatever vLLM may ask a connector is answered by ours or passed on to the wrapped one."""
    ours = {*vars(DejaKVConnector), *vars(Forwarding)}
    asked = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    left = {
        "role", "has_connector_metadata",  # the base class's own
        "get_finished",  # `get_transfer_results` says more
        "get_loaded_kv_cache_group_ids",  # one group, see `refusals`
        "supports_divergent_local_hybrid_hits",  # hybrid models are refused
        "set_xfer_handshake_metadata_pp_aware",  # pipeline parallelism is refused
        "get_external_cache_hit_sources",  # one tier
        "register_finished_partial_tail",  # for recurrent layers, which are refused
    }  # fmt: skip
    assert asked - ours == left


def test_class_methods_are_those_of_the_wrapped_class(monkeypatch):
    """vLLM asks the class, before there is a connector."""
    monkeypatch.setattr(
        ExampleConnector, "requires_piecewise_for_cudagraph", classmethod(lambda cls, extra: extra["x"])
    )
    monkeypatch.setattr(ExampleConnector, "get_required_kvcache_layout", classmethod(lambda cls, config: "HND"))
    inner = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"x": True}}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"inner": inner}))
    assert DejaKVConnector.requires_piecewise_for_cudagraph({"inner": inner})
    assert DejaKVConnector.get_required_kvcache_layout(config) == "HND"
    assert not DejaKVConnector.requires_piecewise_for_cudagraph({})


class Noting:
    """Keeps what a wrapped connector is told."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, list[int]]] = []

    def on_new_request(self, request: Any) -> None:
        """Knows the request."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append((request.request_id, block_ids))
        return True, {"remote": 1}


def test_a_request_that_became_approximate_is_finished_without_blocks():
    """The wrapped connector knew it, so it must forget it, and has nothing of it to save."""
    noting = Noting()
    inner = Inner(noting, isolated=False)
    requests = [SimpleNamespace(request_id=name, cache_salt=None, lora_request=None) for name in ("exact", "blended")]
    for request in requests:
        inner.new_request(request)
    inner.bar("blended")
    assert [inner.finished(request, [1, 2]) for request in requests] == [(True, {"remote": 1}), (False, None)]
    assert noting.finished == [("exact", [1, 2]), ("blended", [])]
    salted = SimpleNamespace(request_id="salted", cache_salt="tenant", lora_request=None)
    inner.new_request(salted)
    assert inner.finished(salted, [3]) == (False, None)
    assert len(noting.finished) == 2
