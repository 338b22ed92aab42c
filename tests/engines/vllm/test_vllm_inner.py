"""A wrapped exact connector, shown with vLLM's example disk connector: it first, ours when it has nothing, no poison in it."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
from counting_connector import CountingStats
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm.connector import DejaKVConnector
from dejakv.engines.vllm.forwarding import Forwarding
from dejakv.engines.vllm.inner import Inner
from dejakv.engines.vllm.stats import DejaKVStats
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


COUNTING = {"kv_connector": "CountingConnector", "kv_connector_module_path": "counting_connector"}


def test_figures_of_the_wrapped_connector_reach_the_metrics(tmp_path):
    inner = {**COUNTING, "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    with running(extra={"inner": inner}, disable_hybrid_kv_cache_manager=True) as engine:
        engine.ask([A])
        metrics = engine.metrics()
    assert metrics["vllm:counted_steps"] >= 6
    assert metrics["vllm:dejakv_lookups"] >= 1


def test_figures_of_both_survive_the_way_to_another_process():
    one, two = (DejaKVStats({"loads": n}, CountingStats({"steps": n}), COUNTING) for n in (1, 2))
    sent = json.loads(json.dumps(one.aggregate(two).to_dict()))
    found = DejaKVConnector.build_kv_connector_stats(sent)
    assert found == DejaKVStats({"loads": 3}, CountingStats({"steps": 3}), COUNTING)
    assert found.reduce() == {"loads": 3, "inner:steps": 3}
    alone = DejaKVStats({"loads": 1})
    assert alone.aggregate(two).reduce() == two.aggregate(alone).reduce() == {"loads": 3, "inner:steps": 2}
    assert DejaKVConnector.build_kv_connector_stats(alone.to_dict()) == alone
    assert DejaKVStats(inner=CountingStats()).is_empty()
    assert not DejaKVStats(inner=CountingStats({"steps": 1})).is_empty()


def test_figures_are_found_below_multi_connector():
    """vLLM goes by the connector's name there, and its logger ends the server if it does not know it."""
    sent = {"DejaKVConnector": {"loads": 2}}
    assert MultiConnector.build_kv_connector_stats(sent).data == {"DejaKVConnector": DejaKVStats({"loads": 2})}


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
        "register_finished_partial_tail",  # for recurrent layers, which are refused
    }  # fmt: skip
    assert asked - ours == left


FORWARDED = [name for name, each in vars(Forwarding).items() if inspect.isfunction(each)]


@pytest.mark.parametrize("name", FORWARDED)
def test_each_call_that_is_not_ours_reaches_the_wrapped_connector(name):
    ours = object.__new__(DejaKVConnector)
    ours._scheduler = None
    given = [SimpleNamespace(request_id="r") for _ in list(inspect.signature(getattr(Forwarding, name)).parameters)[1:]]
    noted = []
    ours._inner = Inner(SimpleNamespace(**{name: lambda *args: noted.append(args) or True}), isolated=True)
    ours._inner._chosen["r"] = 1
    answer = getattr(ours, name)(*given)
    assert noted == [tuple(given)]
    returns = inspect.signature(getattr(KVConnectorBase_V1, name)).return_annotation
    assert answer is True or returns is None or returns is inspect.Signature.empty


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
