"""What ranks that blend agree on, without an engine."""

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from dejakv.engines.vllm.blend.mixer import ELSEWHERE, TOKENS_A_ROW, Blending, Mixer
from dejakv.engines.vllm.blend.underway import LEAST_ROWS, NOT_ALIKE, UnderWay
from dejakv.engines.vllm.ranks import ALONE, Ranks
from dejakv.errors import ModelError


@dataclass
class Planned:
    """A blender that counts rows and computes none. A draft says how many rows its check, its question and its blend take, and how
    many its tokens cost."""

    lockstep: Any = ALONE
    wrong: str = ""
    spent: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def rows_checked(self, draft: Any, block_ids: Any) -> int:
        return draft.check

    def check(self, draft: Any, block_ids: Any) -> None:
        if draft.name == self.wrong and draft.check:
            raise ModelError("another state")
        self.spent.append(("check", draft.check))

    def rows_asked(self, draft: Any) -> int:
        return draft.asks

    def tokens(self, draft: Any) -> int:
        return draft.costs * TOKENS_A_ROW

    def begin(self, draft: Any, block_ids: Any) -> Any:
        if draft.name == self.wrong:
            raise RuntimeError("no memory")
        self.spent.append(("ask", draft.asks))
        return SimpleNamespace(asked=draft.asks, rows=[0] * draft.rows)

    def advance(self, blends: Any, room: int) -> int:
        computed = 0
        for mixing in blends:
            count = min(room - computed, len(mixing.rows))
            mixing.rows = mixing.rows[count:]
            computed += count
        self.spent.append(("rows", computed))
        return computed


def blend(name: str = "a", check: int = 0, asks: int = 0, rows: int = 0, costs: int = 0) -> Blending:
    draft = SimpleNamespace(name=name, check=check, asks=asks, rows=rows, costs=costs)
    return Blending(draft, (1,))  # type: ignore[arg-type]


def test_a_blend_that_fails_fails_alone_and_a_wrong_model_is_told() -> None:
    blends = [blend("a", rows=5), blend("b", check=64, rows=5), blend("c", rows=5)]
    mixer = Mixer(Planned(wrong="b"))  # type: ignore[arg-type]
    mixer.mix(blends, 1000)
    assert [item.problem for item in blends] == ["", "the load failed: another state", ""]
    assert all(item.over for item in blends)
    assert mixer.problem == "another state"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a function as both ranks, each in a thread with a process group of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    numbers = iter(range(100))

    def run(both: Any) -> list[Any]:
        path, results = folder / str(next(numbers)), [None, None]
        store = torch.distributed.FileStore(str(path), 2)  # type: ignore[attr-defined]

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


class Group(Ranks):
    """`Ranks` of a process group that is not torch's global one."""

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
            ranks.each([True, rank == 0, False]),
            ranks.most(0.5 + rank),
            ranks.most(float("nan") if rank else 1.0),
            ranks.summed(torch.tensor([1.0, rank])).tolist(),
            ranks.of_first(torch.tensor([rank, 7], dtype=torch.uint8)).tolist(),
        )

    first, second = two_ranks(both)
    assert first == second == ([True, False, False], 1.5, float("inf"), [2.0, 1.0], [0, 7])


@pytest.mark.parametrize("where", [0, 1])
def test_what_one_rank_cannot_do_none_has_done(two_ranks: Any, where: int) -> None:
    """An error, then a refusal, of one rank alone: both give the same blends up, in the same step, and go on with the others."""

    def both(rank: int, ranks: Group) -> Any:
        blends = [blend("a", rows=50), blend("b", rows=50), blend("c", rows=50)]
        mixer = Mixer(Planned(ranks, "b" if rank == where else ""))  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("marks", "begin", "drop"),
    [(("x", "x"), ["r"], {}), (("x", "y"), [], {"r": NOT_ALIKE}), (("x", ""), [], {"r": NOT_ALIKE}), (("", ""), [], {"r": NOT_ALIKE})],
)  # fmt: skip
def test_a_blend_begins_when_all_ranks_have_fetched_the_same(
    marks: tuple[str, str], begin: list[str], drop: dict[str, str]
) -> None:
    blends = UnderWay(2, 60.0)
    assert blends.room == 0
    blends.ordered("r")
    assert blends.room == LEAST_ROWS
    blends.fetched("r", marks[0])
    assert blends.orders() == ([], {})
    blends.fetched("r", marks[1])
    assert blends.orders() == (begin, drop)
    assert blends.orders() == ([], {})
    blends.ended("r")
    assert blends.room == 0
