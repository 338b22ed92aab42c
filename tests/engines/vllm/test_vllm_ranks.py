"""The stores of both sides and of several ranks, and what ranks share, what they do not, and what they agree on before they blend, without an engine."""

import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from dejakv.engines.vllm.blend.blend import ELSEWHERE, BlendWorker
from dejakv.engines.vllm.blend.state import BlendState
from dejakv.engines.vllm.generations import WeightGenerations
from dejakv.engines.vllm.ranks import NOT_ALIKE, RankGroup, UnderWay, settings_of_rank
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stores import EveryRank
from dejakv.engines.vllm.stores import open_store as open_side
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.budgets import now
from dejakv.store.open import open_store
from dejakv.testing.stored_states import deliveries, make_prompt_state


def test_a_rank_has_its_own_folder_and_its_share_of_the_budgets() -> None:
    settings = ConnectorSettings(store_dir="/x", max_bytes=100, memory_bytes=1, max_write_rate=0, max_pending_bytes=10)
    assert settings_of_rank(settings, 0, 1) is settings
    mine = settings_of_rank(settings, 1, 2)
    assert mine.store == "/x/tp-1-of-2"
    assert (mine.max_bytes, mine.memory_bytes, mine.max_write_rate, mine.max_pending_bytes) == (50, 1, 0, 5)
    assert settings_of_rank(ConnectorSettings(), 1, 2).store is None


@pytest.mark.parametrize("answers", [(True, True), (True, False), (False, True)])
def test_the_epoch_is_back_when_every_rank_has_the_weights_of_the_start(answers: tuple[bool, bool]) -> None:
    made = WeightGenerations("start", 2)
    made.begin()
    epoch = made.epoch
    assert epoch != "start"
    for same in (True, True):
        made.record_answer(0, same)  # of the generation before
    made.record_answer(1, answers[0])
    assert (made.epoch, made.awaits_answers) == (epoch, True)
    made.record_answer(1, answers[1])
    assert (made.epoch, made.awaits_answers) == ("start" if all(answers) else epoch, False)
    made.begin()
    assert made.epoch not in ("start", epoch), "no two generations share an epoch, nor do two processes"


def stored_state(name: str) -> StoredState:
    return StoredState(
        StateInfo(name, "default", "e", (1, 2), "", ""), RawTensor(np.zeros((2, 1, 1, 2, 4), np.float32), "F32")
    )


def test_a_state_is_there_if_every_rank_has_it(tmp_path: Path) -> None:
    stores = [open_store(tmp_path / str(rank)) for rank in range(2)]
    view = EveryRank(stores)
    gone = []
    view.listen(removed=gone.append)
    for name in ("a", "b"):
        for store in stores:
            assert store.put(stored_state(name))
    stores[0].put(stored_state("half"))
    assert {meta.id for meta in view.metas()} == {"a", "b"}
    assert view.meta("half") is None
    there, mark = view.metas_since()
    assert {meta.id for meta in there} == {"a", "b"}
    stores[1].put(stored_state("half"))  # the second rank is later than the look
    assert [meta.id for meta in view.metas_since(mark)[0]] == ["half"]
    stores[1].delete("half")
    gone.clear()
    assert view.meta("a").id == "a"
    stores[1].delete("a")
    assert gone == ["a"]
    assert view.meta("a") is None
    assert {meta.id for meta in view.metas()} == {"b"}
    assert view.delete("b")
    assert not list(view.metas())
    view.close()


def test_a_prefix_of_a_prompt_that_is_not_there_is_found_if_every_rank_has_it(tmp_path: Path) -> None:
    ranks, long = [open_store(tmp_path / str(rank)) for rank in range(2)], make_prompt_state(range(100))
    view, (part, rest) = EveryRank(ranks), deliveries(long, (64, 100))
    assert ranks[0].put(part)
    assert view.find("p", "e", long.meta.token_ids) is None
    assert ranks[1].put(part)
    assert ranks[0].put(rest)  # the other rank is slower
    found = view.find("p", "e", long.meta.token_ids)
    assert found is not None
    assert found[0].tokens == 64
    ranks[1].clear()
    assert view.meta(found[0].donor) is None
    view.close()


VLLM: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(distributed_executor_backend=None),
    kv_transfer_config=SimpleNamespace(engine_id="stores"),
)


def living(tokens: range, *, seconds: float) -> StoredState:
    """A prompt that may be used for so many seconds more, or that has expired so long ago."""
    stored_state = make_prompt_state(tokens)
    return replace(stored_state, meta=replace(stored_state.meta, created=now() - 1_000, ttl=1_000 + seconds))


@pytest.mark.parametrize("on_disk", [False, True])
def test_both_sides_find_nothing_that_has_expired(tmp_path: Path, on_disk: bool) -> None:
    settings = ConnectorSettings(store_dir=str(tmp_path / "s") if on_disk else None)
    theirs, ours = open_side(settings, VLLM, writing=True), open_side(settings, VLLM)
    old, new = living(range(50), seconds=-1), living(range(100, 150), seconds=500)
    try:
        for stored_state in (old, new):
            assert theirs.put(stored_state)
        view = EveryRank([ours])
        for side in (theirs, ours, view):
            assert [meta.id for meta in side.metas()] == [new.meta.id]
            assert side.meta(old.meta.id) is None
            assert [meta.id for meta in side.metas_since()[0]] == [new.meta.id]
    finally:
        ours.close()
        theirs.close()


def test_ranks_have_their_parts_in_one_bucket(tmp_path: Path, bucket: str) -> None:
    """Workers of one machine put them; another machine's scheduler finds what all have, and its workers each their own."""
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"), kv_transfer_config=VLLM.kv_transfer_config
    )
    long = make_prompt_state(range(100))
    parts = [replace(long, tensor=replace(long.tensor, data=long.tensor.data + rank)) for rank in range(2)]

    def sides(machine: str, **more: bool) -> list[Any]:
        settings = ConnectorSettings(store=bucket, disk_dir=str(tmp_path / machine))
        return [open_side(settings_of_rank(settings, rank, 2), engine, **more) for rank in range(2)]

    workers = sides("one", writing=True)
    for side, part in zip(workers, parts, strict=True):
        assert side.put(part)
        side.close()
    view, readers = EveryRank(sides("two")), sides("two", writing=True)
    found = view.find("p", "e", long.meta.token_ids, whole=True)
    assert found is not None
    assert (found[0].tokens, view.remote_read_seconds(found[0].donor) > 0) == (100, True)
    for side, part in zip(readers, parts, strict=True):
        np.testing.assert_array_equal(side.get(long.meta.id).tensor.data, part.tensor.data)
        side.close()
    assert view.remote_read_seconds(found[0].donor) == 0, "copies are on this machine's disk"
    view.close()


@dataclass
class Planned:
    """A blender that counts rows and computes none, and fails with one draft."""

    lockstep: Any
    wrong: str

    def rows_checked(self, blend: Any) -> int:
        return 0

    def check(self, blend: Any) -> None: ...

    def begin(self, blend: Any) -> None:
        if blend.draft.name == self.wrong:
            raise RuntimeError("no memory")
        blend.begun, blend.rows = True, torch.arange(50)

    def advance(self, blends: Any, room: int) -> int:
        for blend in blends:
            taken = min(room, len(blend.rows))
            blend.rows, room = blend.rows[taken:], room - taken
        return 0


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a function as both ranks, each in a thread with a process group of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    numbers = iter(range(100))

    def run(both: Any) -> list[Any]:
        path, results = folder / str(next(numbers)), [None, None]
        store = torch.distributed.FileStore(str(path), 2)

        def one(rank: int) -> None:
            group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
            results[rank] = both(rank, Group(group))

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            assert not thread.is_alive(), "a rank waits for the other one"
        return results

    return run


class Group(RankGroup):
    """`RankGroup` of a process group that is not torch's global one."""

    def __init__(self, group: Any) -> None:
        self.ranks, self._group, self._first = 2, group, 0

    def _all(self, values: torch.Tensor, how: Any) -> None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = how
        self._group.allreduce([values], options).wait()

    def _from_first(self, values: torch.Tensor) -> None:
        self._group.broadcast(values, 0).wait()


def test_ranks_agree(two_ranks: Any) -> None:
    def both(rank: int, ranks: Group) -> Any:
        return (
            ranks.all_agree([True, rank == 0, False]),
            ranks.maximum(0.5 + rank),
            ranks.maximum(float("nan") if rank else 1.0),
            ranks.total(torch.tensor([1.0, rank])).tolist(),
            ranks.broadcast_first(torch.tensor([rank, 7], dtype=torch.uint8)).tolist(),
        )

    first, second = two_ranks(both)
    assert first == second == ([True, False, False], 1.5, float("inf"), [2.0, 1.0], [0, 7])


def test_ranks_leave_what_they_are_given(two_ranks: Any) -> None:
    def both(rank: int, ranks: Group) -> Any:
        values, transposed = torch.tensor([1.0, rank]), torch.tensor([[1.0, 2.0], [3.0, rank]]).T
        results = ranks.total(values), ranks.broadcast_first(values), ranks.broadcast_first(transposed)
        return values.tolist(), transposed.tolist(), [result.tolist() for result in results]

    first, second = two_ranks(both)
    assert first[:2] == ([1.0, 0.0], [[1.0, 3.0], [2.0, 0.0]])
    assert second[:2] == ([1.0, 1.0], [[1.0, 3.0], [2.0, 1.0]])
    assert first[2] == second[2] == [[2.0, 1.0], [1.0, 0.0], [[1.0, 3.0], [2.0, 0.0]]]


@pytest.mark.parametrize("where", [0, 1])
def test_what_one_rank_cannot_do_none_has_done(two_ranks: Any, where: int) -> None:
    """An error, then a refusal, of one rank alone: both give the same blends up, in the same step, and go on with the others."""

    def both(rank: int, ranks: Group) -> Any:
        blends: Any = [
            BlendState(
                SimpleNamespace(name=name, question_rows=0, tokens=0, plan=SimpleNamespace(minimum_count=50)), (1,)
            )
            for name in "abc"
        ]
        mixer = BlendWorker(Planned(ranks, "b" if rank == where else ""))
        mixer.mix(blends, 70)
        problems = [[item.problem for item in blends]]
        mixer.mix([item for item in blends if not item.over], 10, "the weights changed" if rank == where else "")
        return [*problems, [item.problem for item in blends]]

    results = two_ranks(both)
    assert results[where] == [
        ["", "the load failed: RuntimeError", ""],
        ["", "the load failed: RuntimeError", "the weights changed"],
    ]
    assert results[1 - where] == [["", ELSEWHERE, ""], ["", ELSEWHERE, ELSEWHERE]]


@pytest.mark.parametrize("marks", [("x", "x"), ("x", "y"), ("x", ""), ("", "")])
def test_a_blend_begins_when_all_ranks_have_fetched_the_same(marks: tuple[str, str]) -> None:
    blends = UnderWay(2)
    blends.ordered("r")
    blends.fetched("r", marks[0])
    blends.remain({"r": 50})
    assert (blends.orders(), blends.rows) == (([], {}), {"r": 0})
    blends.fetched("r", marks[1])
    blends.remain({"r": 50})
    assert blends.rows == {"r": 50 if marks == ("x", "x") else 0}
    assert blends.orders() == ((["r"], {}) if marks == ("x", "x") else ([], {"r": NOT_ALIKE}))
    assert blends.orders() == ([], {})
    blends.ended("r")
    assert not blends.rows
