"""Prompts larger than what saves may hold in memory: stored in parts, and no request's blocks are kept for nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_harness import running, tokens, worker_side

from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.found import Found
from dejakv.engines.vllm.long_saves import PATIENCE_S, LongSaves, PartSize
from dejakv.engines.vllm.messages import Save
from dejakv.engines.vllm.pace import Pace
from dejakv.engines.vllm.saver import BACKLOG
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.tracked import Tracked
from dejakv.identity import Span
from dejakv.store.base import ChunkMeta
from dejakv.store.open import open_store

META = ChunkMeta("long", "default", "e", tuple(range(100)), "", "")
ENDS = (32, 64, 100)
BLOCKS = (7, 8, 9, 10)


class Saving:
    """Long saves on their own, with the clock and all that they tell."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[tuple[str, str]] = []
        self.long = LongSaves(lambda *told: self.ended.append(told), lambda: self.now)

    def begin(self, *, held: bool = False) -> "Saving":
        self.long.add(META, "r", BLOCKS, ENDS, 3, held=held)
        return self

    def rows(self) -> tuple[int, int] | None:
        """The part that this step orders."""
        orders, _ = self.long.take()
        assert all(order == Save(META, BLOCKS, 3, None, order.rows) for order in orders)
        return orders[0].rows if orders else None

    def releases(self) -> set[str]:
        return self.long.take()[1]


def test_parts_are_ordered_one_after_the_other() -> None:
    saving = Saving().begin(held=True)
    for rows in ((0, 32), (32, 64)):
        assert saving.rows() == rows
        assert saving.rows() is None, "it is not answered yet"
        assert saving.long.heard("long", "") is None
    assert saving.rows() == (64, 100)
    assert not saving.releases()
    assert saving.long.heard("long", "") == ""
    assert saving.releases() == {"r"}
    assert len(saving.long) == 0
    assert not saving.ended


def test_a_part_for_which_there_is_no_room_is_repeated_for_a_while() -> None:
    saving = Saving().begin(held=True)
    for _ in range(3):
        saving.now += 1
        assert saving.rows() == (0, 32)
        assert saving.long.heard("long", BACKLOG) is None
    saving.now += PATIENCE_S
    assert saving.long.take() == ([], {"r"})
    assert [id for id, _ in saving.ended] == ["long"]


def test_a_store_that_hangs_does_not_keep_blocks() -> None:
    saving = Saving().begin(held=True)
    assert saving.rows() == (0, 32)
    saving.now += PATIENCE_S
    assert saving.releases() == {"r"}
    assert not saving.ended, "the copy that is under way still has to be heard of"
    assert saving.rows() is None
    assert (saving.long.heard("long", "") or "").startswith("too slow")
    assert not saving.releases()


def test_a_part_that_fails_ends_it() -> None:
    saving = Saving().begin(held=True)
    assert saving.rows() == (0, 32)
    assert saving.long.heard("long", "") is None
    assert saving.rows() == (32, 64)
    assert saving.long.heard("long", "error: disk full") == "error: disk full"
    assert saving.releases() == {"r"}
    assert saving.rows() is None


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_request_that_loses_its_blocks_is_not_stored(how: str, ordered: bool) -> None:
    saving = Saving().begin()
    assert not ordered or saving.rows() == (0, 32)
    if how == "aborted":
        assert saving.long.finished("r", lost=True) is False
    else:
        assert saving.long.preempted("r")
        assert not saving.long.preempted("r")
    assert saving.rows() is None
    if ordered:
        assert saving.long.heard("long", "")
    else:
        assert len(saving.ended) == 1
    assert not saving.releases()
    assert len(saving.long) == 0


def test_a_request_that_is_over_keeps_its_blocks_until_the_last_part() -> None:
    saving = Saving().begin()
    assert saving.rows() == (0, 32)
    assert saving.long.finished("r", lost=False) is True
    assert saving.long.finished("other", lost=False) is False
    for _ in range(2):
        assert saving.long.heard("long", "") is None
        assert not saving.releases() or saving.rows()
        saving.rows()
    assert saving.long.heard("long", "") == ""
    assert saving.releases() == {"r"}


def test_what_was_stored_to_the_end_is_stored_whatever_came_meanwhile() -> None:
    saving = Saving().begin()
    for _ in ENDS[:-1]:
        saving.rows()
        saving.long.heard("long", "")
    assert saving.rows() == (64, 100)
    assert saving.long.preempted("r")
    assert saving.long.heard("long", "") == ""


def test_blocks_that_a_wrapped_connector_frees_are_not_waited_for() -> None:
    index = SimpleNamespace()
    adapters = SimpleNamespace(base="e", may_store=lambda lora: True)
    lookups: Any = SimpleNamespace(adapters=adapters, index=index, pace=Pace())
    side = SchedulerSide(ConnectorSettings(), lookups, 32, Counts(), size=PartSize(32, 16))
    request = SimpleNamespace(
        request_id="r", lora_request=None, kv_transfer_params=None, status=None, num_computed_tokens=100,
        num_prompt_tokens=100, num_output_tokens=1,
    )  # fmt: skip
    for block_ids, held in (((1, 2, 3, 4), True), ((), False)):
        tracked = Tracked(request, Wish(), None, 0.0, found=Found(save=META))
        side.requests["r"] = tracked
        side.saves.order(tracked, (1, 2, 3, 4), release=False)
        assert side.finished(request, block_ids)[0] is held
        assert bool(side.saves.take()[0]) is held
        side.reset()
        side.saves.heard("long", "error")
        side.generations.problem, side.generations.number = "", 0
    assert not side.saves.pending


def test_which_prompts_are_stored_in_parts() -> None:
    assert PartSize().ends(META) == (100,)
    assert PartSize(50, 16).ends(META) == (100,)
    assert PartSize(49, 16).ends(META) == (48, 96, 100)
    picture = replace(META, spans=(Span(40, 30, "ab" * 32),))
    assert PartSize(49, 16).ends(picture) == (48, 96, 100), "a part may end inside of a picture"


LONG = tokens(700, 31)
ROW = 2 * 4 * 2 * 64 * 4
"""Bytes of a token in docs-lm's cache."""


@pytest.mark.parametrize("answer", [1, 40])
def test_a_prompt_larger_than_the_pending_budget_is_stored_in_parts(tmp_path, answer: int) -> None:
    """An answer of one token ends the request before a part is stored; a longer one goes on meanwhile."""
    with running(connector=False) as engine:
        (truth,) = engine.ask([LONG], max_tokens=answer)
    budget = {"store_dir": str(tmp_path / "store"), "max_pending_bytes": 256 * ROW}
    with running(extra=budget) as engine:
        saver, sizes = worker_side().saver, []
        submit = saver.submit
        saver.submit = lambda id, nbytes, make, **more: (sizes.append(nbytes), submit(id, nbytes, make, **more))
        (output,) = engine.ask([LONG], max_tokens=answer)
        engine.settle()
        assert output.tokens == truth.tokens
        assert sizes[:6] == [128 * ROW] * 5 + [60 * ROW]
        free = engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        engine.reset_prefix_cache()
        (again,) = engine.ask([LONG], max_tokens=answer)
        assert (again.told["method"], again.cached) == ("exact", 699)
        assert again.tokens == truth.tokens
    store = open_store(tmp_path / "store")
    assert [meta.num_tokens for meta in store.metas() if meta.token_ids == tuple(LONG[: meta.num_tokens])] == [
        len(LONG)
    ]
    store.close()


def test_a_part_that_is_not_stored_leaves_a_prefix(tmp_path) -> None:
    budget = {"store_dir": str(tmp_path / "store"), "max_pending_bytes": 256 * ROW}
    with running(extra=budget) as engine:
        store = worker_side().store
        put = store.put
        store.put = lambda chunk: chunk.first < 256 and put(chunk)
        (truth,) = engine.ask([LONG], max_tokens=8)
        engine.settle()
        engine.connector.scheduler_side.lookups.index._pool.submit(int).result()
        inner = open_store(tmp_path / "store")
        assert not [meta for meta in inner.metas() if meta.num_tokens > 4]
        inner.close()
        store.put = put
        engine.reset_prefix_cache()
        (again,) = engine.ask([LONG], max_tokens=8)
        assert again.told["method"] in ("prefix", "exact"), "what was stored serves"
        assert again.tokens == truth.tokens
        engine.settle()
        engine.reset_prefix_cache()
        (stored,) = engine.ask([LONG], max_tokens=8)
        assert (stored.told["method"], stored.tokens) == ("exact", truth.tokens)
        assert engine.metrics()["vllm:dejakv_saves_dropped"] == 1
