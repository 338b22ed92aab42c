"""Which encoder outputs are at hand, without an engine: whatever a client calls its pictures."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.vllm.encoder_connector import DejaKVEncoderConnector, EncoderFinder, EncoderSettings
from dejakv.engines.vllm.identity import partition_of
from dejakv.errors import ConfigError
from dejakv.testing.stores import AheadClock

CACHE = VisualKVCache(10, 1 << 20)


@pytest.fixture
def finder() -> Iterator[EncoderFinder]:
    made = EncoderFinder(CACHE.view, "e", 30.0)
    yield made
    made.close()


def request(name: str, pixels: float, **more: Any) -> Any:
    """With one picture, which the client calls `mine`."""
    data = {"pixel_values": SimpleNamespace(data=torch.full((3, 2, 2), pixels))}
    feature = SimpleNamespace(data=data, identifier="mine", mm_hash=more.pop("mm_hash", "mine"), modality="image")
    chosen = {"cache_salt": None, "lora_request": None, "kv_transfer_params": None, "ec_transfer_params": None}
    return SimpleNamespace(request_id=name, mm_features=[feature], **(chosen | more))


def looked_at(finder: EncoderFinder, asked: Any) -> Any:
    while not finder.ready(asked):
        time.sleep(0.001)
    return finder.sight("mine")


@pytest.mark.parametrize(
    "choice",
    [
        {"ec_transfer_params": {"dejakv": {"mode": "off"}}},
        {"lora_request": "an adapter", "mm_hash": "without the adapter"},
    ],
)
def test_a_name_says_nothing_of_a_picture_that_was_not_looked_at(finder: EncoderFinder, choice: dict[str, Any]) -> None:
    """Its output would be filed as that of the other picture of this name, and loaded in that one's place from then on."""
    known = looked_at(finder, request("a", 1.0))
    assert (known.digest, known.embedding) == (looked_at(finder, request("b", 1.0)).digest, None)
    assert looked_at(finder, request("c", 2.0, **choice)) is None
    assert looked_at(finder, request("a", 1.0)) == known, "it is the other request that was not looked at"


def test_nor_of_one_whose_lookup_is_late() -> None:
    late = threading.Event()
    finder = EncoderFinder(lambda *of: (late.wait(), CACHE.view(*of))[1], "e", 0.0)
    assert looked_at(finder, request("a", 1.0)) is None
    late.set()
    finder.close()


def test_nor_of_one_whose_content_is_not_at_hand(finder: EncoderFinder) -> None:
    """vLLM's cache in shared memory gives the scheduler a place in it."""
    asked = request("a", 1.0)
    asked.mm_features[0].data = {"address": SimpleNamespace(data=4096), "monotonic_id": SimpleNamespace(data=7)}
    assert looked_at(finder, asked) is None


def test_a_name_of_two_pictures_leads_nowhere(finder: EncoderFinder) -> None:
    assert looked_at(finder, request("a", 1.0)) is not None
    assert looked_at(finder, request("b", 2.0)) is None
    assert looked_at(finder, request("a", 1.0)) is None


def test_an_output_that_is_stored_is_found(finder: EncoderFinder) -> None:
    """By a request of which nothing is kept too; then its picture is forgotten with it."""
    known = looked_at(finder, request("a", 1.0))
    CACHE.view("e", partition_of(None)).store(known.digest, "image", torch.ones(2, 3))
    unkept = request("b", 1.0, kv_transfer_params={"dejakv": {"no_store": True}})
    assert torch.equal(torch.as_tensor(looked_at(finder, unkept).embedding), torch.ones(2, 3))
    finder.forget(unkept)
    assert finder.sight("mine") is None


def test_outputs_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = AheadClock()
    monkeypatch.setattr("dejakv.encoder_cache.encode_once.clock", clock)
    view = EncoderSettings.from_extra({"ttl": 60}).open().view("e", "p")
    view.store("a" * 64, "image", np.ones((2, 3), np.float32))
    assert view.lookup("a" * 64) is not None
    clock.seconds = 61
    assert view.lookup("a" * 64) is None


def test_a_registry_that_no_lookup_would_see_is_refused() -> None:
    """Workers that are processes of their own would each fill one in memory."""
    transfer = SimpleNamespace(
        ec_role="ec_both", is_ec_producer=True, is_ec_consumer=True, engine_id="e", ec_connector_extra_config={}
    )
    config = SimpleNamespace(
        ec_transfer_config=transfer, parallel_config=SimpleNamespace(distributed_executor_backend="mp")
    )
    with pytest.raises(ConfigError, match="give a store"):
        DejaKVEncoderConnector(config, ECConnectorRole.SCHEDULER)
