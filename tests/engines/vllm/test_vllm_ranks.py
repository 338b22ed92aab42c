"""What ranks share and what they do not, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dejakv.engines.vllm.lookups import Pace
from dejakv.engines.vllm.messages import BACKLOG, LoadResult, StepReport
from dejakv.engines.vllm.ranks import settings_of_rank
from dejakv.engines.vllm.request import LookupResult, Tracked
from dejakv.engines.vllm.saves import PartSize
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.stats import ConnectorCounts
from dejakv.engines.vllm.stores import EveryRank
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.open import open_store
from dejakv.testing.chunks import check_whole, deliveries, prompt_chunk

META = ChunkMeta("a", "default", "e", (1, 2), "", "")


def _chunk(name):
    return Chunk(replace(META, id=name), Tensor(np.zeros((2, 1, 1, 2, 4), np.float32), "F32"))


def _side(**index):
    adapters = SimpleNamespace(base="start")
    lookups = SimpleNamespace(adapters=adapters, index=SimpleNamespace(**index), pace=Pace())
    return SchedulerSide(ConnectorSettings(), lookups, 32, ConnectorCounts(), ranks=2)


def test_a_rank_has_its_own_folder_and_its_share_of_the_budgets():
    settings = ConnectorSettings(store_dir="/x", max_bytes=100, memory_bytes=1, max_write_rate=0, max_pending_bytes=10)
    assert settings_of_rank(settings, 0, 1) is settings
    mine = settings_of_rank(settings, 1, 2)
    assert mine.store_dir == "/x/tp-1-of-2"
    assert (mine.max_bytes, mine.memory_bytes, mine.max_write_rate, mine.max_pending_bytes) == (50, 1, 0, 5)
    assert settings_of_rank(ConnectorSettings(), 1, 2).store_dir is None


def test_one_failed_load_is_a_failure():
    good, bad = LoadResult("r", 10, 2.0), LoadResult("r", 0, 0.0, problem="gone")
    assert LoadResult.together([good, bad]) == LoadResult.together([bad, good]) == bad
    assert LoadResult.together([good, replace(good, seconds=3.0)]) == LoadResult("r", 20, 3.0)
    assert LoadResult.together([good]) == good


@pytest.mark.parametrize(("second", "stored"), [("", True), ("backlog", False)])
def test_a_chunk_is_indexed_when_every_rank_confirmed_it(second, stored):
    indexed = []
    side = _side(stored=indexed.append)
    side.saves.pending["a"] = META
    side.heard(StepReport(["a"]))
    assert not indexed
    assert "a" in side.saves.pending  # not ordered again while a rank is at it
    side.heard(StepReport([], [("a", second)]) if second else StepReport(["a"]))
    assert indexed == ([META] if stored else [])
    assert not side.saves.pending
    assert side.counts.take() == ({"saves": 1} if stored else {"saves_dropped|backlog": 1})


def test_the_epoch_is_back_when_every_rank_has_the_weights_of_the_start():
    side = _side()
    epochs = ["start"]
    for answers, back in [((True, True), True), ((True, False), False), ((False, True), False), ((True, True), True)]:
        side.reset()
        assert side.generations.unknown
        epochs.append(side.lookups.adapters.base)
        old = side.generations.number - 1
        side.heard(StepReport(weights=[(old, True), (old, True)]))  # of the generation before
        side.heard(StepReport(weights=[(side.generations.number, answers[0])]))
        assert side.lookups.adapters.base == epochs[-1]
        side.heard(StepReport(weights=[(side.generations.number, answers[1])]))
        assert not side.generations.unknown
        assert side.lookups.adapters.base == ("start" if back else epochs[-1])
    assert len(set(epochs)) == len(epochs), "no two generations share an epoch, nor do two processes"
    side.heard(StepReport(changed=True))
    assert "without a reset" in side.generations.problem
    side.reset()
    assert not side.generations.problem


def test_a_chunk_is_there_if_every_rank_has_it(tmp_path):
    stores = [open_store(tmp_path / str(rank)) for rank in range(2)]
    view = EveryRank(stores)
    gone = []
    view.on_evict(gone.append)
    for name in ("a", "b"):
        for store in stores:
            assert store.put(_chunk(name))
    stores[0].put(_chunk("half"))
    assert {meta.id for meta in view.metas()} == {"a", "b"}
    assert view.meta("half") is None
    there, mark = view.added()
    assert {meta.id for meta in there} == {"a", "b"}
    stores[1].put(_chunk("half"))  # the second rank is later than the look
    assert [meta.id for meta in view.added(mark)[0]] == ["half"]
    stores[1].delete("half")
    gone.clear()
    assert view.meta("a").id == "a"
    assert view.stats().entries == 2
    assert not view.put(_chunk("c"))
    assert view.get("a") is None
    stores[1].delete("a")
    assert gone == ["a"]
    assert view.meta("a") is None
    assert {meta.id for meta in view.metas()} == {"b"}
    assert view.delete("b")
    assert not list(view.metas())
    view.close()


def test_a_prefix_of_a_prompt_that_is_not_there_is_found_if_every_rank_has_it(tmp_path):
    ranks, long = [open_store(tmp_path / str(rank)) for rank in range(2)], prompt_chunk(range(100))
    view, part = EveryRank(ranks), deliveries(long, (64, 100))[0]
    assert ranks[0].put(part)
    assert view.find("p", "e", long.meta.token_ids) is None
    assert ranks[1].put(part)
    found = view.find("p", "e", long.meta.token_ids)
    assert found is not None
    assert found[0].tokens == 64
    ranks[1].clear()
    assert view.meta(found[0].donor) is None
    view.close()


def test_a_long_prompt_goes_on_when_every_rank_has_stored_its_part(tmp_path):
    """One that has no room yet makes all repeat the part, which the others take as stored; one that fails ends it for all."""
    ranks = [open_store(tmp_path / str(rank)) for rank in range(2)]
    view, long = EveryRank(ranks), prompt_chunk(range(100))
    indexed, counts = [], ConnectorCounts()
    side = _side(stored=indexed.append)
    side.saves.counts, side.saves.size = counts, PartSize(32, 16)
    request = SimpleNamespace(request_id="r", lora_request=None)
    side.lookups.adapters.may_store = lambda lora: True
    parts = dict(zip([(0, 32), (32, 64), (64, 96), (96, 100)], deliveries(long, (32, 64, 96, 100)), strict=True))

    def ordered():
        (save,), _ = side.saves.take()
        return save.rows

    def tried(fails=None):
        tracked = Tracked(request, Wish(), None, 0.0, found=LookupResult(save=long.meta))
        assert side.saves.order(tracked, (1, 2, 3), release=True)
        for rows in parts:
            assert ordered() == rows
            if rows == (32, 64):
                assert ranks[0].put(parts[rows])
                side.heard(StepReport([long.meta.id], [(long.meta.id, BACKLOG)]))
                assert ordered() == rows
                if fails:
                    side.heard(StepReport([long.meta.id], [(long.meta.id, fails)]))
                    return
            for store in ranks:
                assert store.put(parts[rows])
            side.heard(StepReport([long.meta.id, long.meta.id]))

    tried(fails="error: disk full")
    assert [list(store.metas()) for store in ranks] == [[], []]
    assert (side.saves.take(), side.saves.pending) == (([], frozenset({"r"})), {})
    tried()
    assert indexed == [long.meta]
    assert [meta.id for meta in view.metas()] == [long.meta.id]
    check_whole(ranks[0], [long])
    assert counts.take() == {"saves_dropped|error": 1, "saves": 1}
    view.close()
