"""KV events of the store, as vLLM's own scheduler publishes them: hashes are those of the blocks that vLLM files."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from toy_engine import BLOCK, ToyEngine
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm_harness import tokens

from dejakv.engines.vllm.events import BlockChain, StoreEvents

A = tokens(100, 1)
Start = Callable[..., ToyEngine]


class Router:
    """What a router knows of a replica: blocks by medium, told once, in an order in which the parent is known."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[Any, BlockStored]] = {"GPU": {}, "CPU": {}, "STORAGE": {}}

    def publish(self, batch: Any) -> None:
        # As it comes over the wire.
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.blocks.values():
                    blocks.clear()
                continue
            blocks = self.blocks[event.medium]
            for each in event.block_hashes:
                if isinstance(event, BlockStored):
                    assert event.medium == "GPU" or each not in blocks, "announced twice"
                    blocks[each] = event
                else:
                    blocks.pop(each)
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in blocks
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size

    def shutdown(self) -> None:
        pass

    @property
    def loadable(self) -> set[Any]:
        return {*self.blocks["CPU"], *self.blocks["STORAGE"]}


@pytest.fixture
def started(toy: Start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ToyEngine, Router]]:
    """Starts an engine that publishes KV events to a router of this test."""
    import toy_engine

    def start(extra: dict[str, Any]) -> tuple[ToyEngine, Router]:
        config = toy_engine._base_config()
        monkeypatch.setattr(config, "kv_events_config", KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
        engine, router = toy(extra), Router()
        engine.scheduler.kv_event_publisher = router
        return engine, router

    return start


def test_a_stored_prompt_is_announced_with_vllms_hashes_and_taken_back(started: Any) -> None:
    engine, router = started({})
    engine.ask(A, salt="tenant")
    engine.settle()
    gpu, ours = router.blocks["GPU"], router.blocks["CPU"]
    assert len(ours) == len(A) // BLOCK
    assert set(ours) <= set(gpu)
    event, vllms = next(iter(ours.values())), next(iter(gpu.values()))
    assert (event.token_ids, event.parent_block_hash, event.ownership) == (A[: BLOCK * 6], None, "dejakv")
    assert (event.extra_keys or [])[:1] == (vllms.extra_keys or [])[:1] == [("tenant",)]
    assert event.kv_cache_spec_kind == vllms.kv_cache_spec_kind is not None

    # Of a prompt that goes on only what is new, behind its parent; it stays until the last prompt with it has left.
    engine.ask(A + tokens(40, 5), salt="tenant")
    engine.settle()
    more = list(ours.values())[-1]
    assert (more.parent_block_hash, len(more.token_ids)) == (list(ours)[5], 2 * BLOCK)
    store = engine.scheduler.connector.scheduler_side.lookups.cache.store
    first, second = sorted(store.metas(), key=lambda meta: meta.num_tokens)
    store.delete(first.id)
    engine.ask([7] * 20, no_store=True)
    assert len(router.loadable) == 8
    store.delete(second.id)
    engine.ask([7] * 20, no_store=True)
    assert router.loadable == set()


def test_what_an_earlier_process_stored_is_announced_at_its_first_hit(started: Any, tmp_path: Any) -> None:
    engine, _ = started({"store": str(tmp_path)})
    engine.ask(A)
    engine.settle()
    engine, router = started({"store": str(tmp_path)})
    assert engine.ask(A).told["method"] == "exact"
    engine.settle()
    # The last token is computed in any case, and 6 full blocks lie before it.
    assert len(router.blocks["STORAGE"]) == 6

    # vLLM tells routers to forget all, so the next hit announces it again.
    engine.forget()
    engine.ask([7] * 20, no_store=True)
    assert router.loadable == set()
    assert engine.ask(A).told["method"] == "exact"
    engine.settle()
    assert len(router.loadable) == 6

    # After a reset that may mean other weights nothing is known to be loadable.
    engine.reset(connector=True)
    engine.ask([7] * 20, no_store=True)
    assert router.loadable == set()


def test_kept_answers_are_announced_with_their_tokens(started: Any) -> None:
    engine, router = started({"generated_text": "keep"})
    asked = engine.ask(A[:20], count=45)
    engine.settle()
    told = {token for event in router.blocks["CPU"].values() for token in event.token_ids}
    assert len(router.loadable) == (len(A[:20]) + 44) // BLOCK
    assert set(asked.tokens[:40]) <= told


def test_an_entry_that_leaves_before_it_is_announced_is_not() -> None:
    events = StoreEvents(1, lambda request, blocks: BlockChain((b"1",), (1,), None, {}), dict, list)
    chain = events.describe("id", None, 1)
    events.removed("id")
    events.stored("id", chain)
    assert events.take() == []
    events.stored("id", events.describe("id", None, 1))
    assert [event["hashes"] for event in events.take()] == [[b"1"]]
    events.withdraw()
    assert events.take() == [[b"1"]], "its weights may be others"


def test_without_vllms_events_there_are_none(toy: Start) -> None:
    engine = toy({})
    assert engine.scheduler.connector.scheduler_side.events is None
    assert list(engine.scheduler.connector.take_events()) == []
