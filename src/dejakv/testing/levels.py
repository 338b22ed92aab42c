"""Conformance suites for levels, guards and indexes: subclass, give a `make`, and run with pytest.

class TestMine(LevelTests):
    def make(self) -> Level: return MyLevel()
    def query(self, topic: int, space: str = "s") -> Query: ...  # equal topics must match, other topics must not
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from dejakv.decide.guards.base import Guard, judge
from dejakv.decide.levels.base import Level, Match, Query
from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.store.base import ChunkMeta
from dejakv.vectors.flat import FlatIndex

Case = tuple[Request, ChunkMeta, Match]


class LevelTests:
    """What every level must do. `query(topic)` gives queries that match exactly where the topics are equal."""

    def make(self) -> Level:
        raise NotImplementedError("a conformance suite needs `make`: return an empty level")

    def query(self, topic: int, space: str = "s") -> Query:
        return Query(Request(id="r", prompt=f"question {topic}", chunk=f"question {topic}"), space)

    @pytest.fixture
    def level(self) -> Level:
        return self.make()

    def donors(self, level: Level, query: Query) -> list[str]:
        return [match.donor for match in level.search(query).matches]

    def test_it_reports_a_status_of_hit_miss_or_skip(self, level: Level) -> None:
        search = level.search(self.query(1))
        assert (search.matches, len(level)) == ((), 0)
        assert search.statuses, "every level reports a status"
        assert "hit" not in search.statuses.values()
        level.add("one", self.query(1))
        level.add("two", self.query(2))
        search = level.search(self.query(2))
        assert search.matches[0].donor == "two"
        assert "hit" in search.statuses.values()
        assert search.matches[0].level in search.statuses or search.matches[0].level.startswith("embedding:")

    def test_topics_and_spaces_do_not_see_each_other(self, level: Level) -> None:
        level.add("one", self.query(1, "tenant a"))
        assert self.donors(level, self.query(2, "tenant a")) == []
        assert self.donors(level, self.query(1, "tenant b")) == []
        assert self.donors(level, self.query(1, "")) == []
        assert self.donors(level, self.query(1, "tenant a")) == ["one"]

    def test_adding_and_removing_are_idempotent_and_complete(self, level: Level) -> None:
        for _ in range(3):
            level.add("one", self.query(1))
        assert len(level) == 1
        assert self.donors(level, self.query(1)) == ["one"]
        level.add("two", self.query(1))
        for donor in ("one", "one", "never added"):
            level.remove(donor)
        assert len(level) == 1
        assert self.donors(level, self.query(1)) == ["two"]
        level.remove("two")
        assert self.donors(level, self.query(1)) == []

    def test_a_donor_added_anew_moves(self, level: Level) -> None:
        level.add("one", self.query(1, "a"))
        level.add("one", self.query(2, "b"))
        assert len(level) == 1
        assert self.donors(level, self.query(1, "a")) == []
        assert self.donors(level, self.query(2, "b")) == ["one"]

    def test_matches_are_best_first_and_bounded(self, level: Level) -> None:
        for donor in range(30):
            level.add(f"d{donor}", self.query(1))
        scores = [match.score for match in level.search(self.query(1)).matches]
        assert 1 <= len(scores) <= 16
        assert scores == sorted(scores, reverse=True)
        assert all(-1.0001 <= score <= 1.0001 for score in scores)

    def test_empty_text_matches_nothing(self, level: Level) -> None:
        empty = Query(Request(id="r", prompt="", chunk=" "), "s")
        level.add("empty", empty)
        search = level.search(empty)
        assert search.matches == ()
        assert set(search.statuses.values()) == {"skip"}


class GuardTests:
    """What every guard must do. `accepted()` gives a triple it accepts or abstains on, `rejected()` one it rejects (None
    if it never rejects)."""

    def make(self) -> Guard:
        raise NotImplementedError("a conformance suite needs `make`: return a guard")

    def accepted(self) -> Case:
        raise NotImplementedError("a conformance suite needs `accepted`: return request, donor and match")

    def rejected(self) -> Case | None:
        raise NotImplementedError("a conformance suite needs `rejected`: return request, donor and match, or None")

    def test_verdicts_repeat_and_carry_name_and_reason(self) -> None:
        guard, case = self.make(), self.accepted()
        first = guard.judge(*case)
        assert first.decision in ("accept", "abstain")
        assert guard.judge(*case) == first
        for agreed in (True, False):
            guard.observe(*case, agreed)
        for verdict in (first, guard.judge(*case)):
            assert verdict.guard == guard.name
            assert verdict.reason

    def test_a_rejection_carries_name_and_reason_and_decides_a_chain(self) -> None:
        case = self.rejected()
        if case is None:
            pytest.skip("this guard says that it never rejects")
        guard = self.make()
        verdict = guard.judge(*case)
        assert (verdict.decision, verdict.guard) == ("reject", guard.name)
        assert verdict.reason
        assert judge([self.make()], *case).decision == "reject"


class IndexTests:
    """What every index of vectors must do; approximate ones may miss neighbours, but not in a handful."""

    dim = 24

    def make(self, dim: int) -> FlatIndex:
        raise NotImplementedError("a conformance suite needs `make`: return an empty index of this dimension")

    def filled(self, count: int) -> tuple[FlatIndex, NDArray[np.float32]]:
        """An index of random unit vectors, whose ids are their numbers, and the vectors."""
        rows = np.random.default_rng(0).standard_normal((count, self.dim)).astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        index = self.make(self.dim)
        for place, row in enumerate(rows):
            index.add(str(place), row * (place + 1))
        return index, rows

    def test_an_empty_one_finds_nothing(self) -> None:
        index = self.make(self.dim)
        assert (len(index), index.dim) == (0, self.dim)
        assert index.search(np.ones(self.dim, np.float32), 5) == []

    def test_a_vector_finds_itself_with_cosine_one_whatever_its_length(self) -> None:
        index, rows = self.filled(40)
        for place, row in enumerate(rows):
            ((id, score),) = index.search(row * 0.01, 1)
            assert id == str(place)
            assert score == pytest.approx(1.0, abs=5e-3)
        assert len(index) == 40

    def test_search_is_sorted_bounded_and_agrees_with_scores(self) -> None:
        index, rows = self.filled(50)
        hits = index.search(rows[3], 10)
        assert len(hits) == 10
        assert [s for _, s in hits] == sorted((s for _, s in hits), reverse=True)
        again = index.scores(rows[3], [id for id, _ in hits])
        assert again == pytest.approx([s for _, s in hits], abs=5e-3)
        assert index.scores(rows[3], ["unknown"]) == [None]
        assert len(index.search(rows[3], 1000)) == 50
        least = (hits[4][1] + hits[5][1]) / 2
        assert [id for id, _ in index.search(rows[3], 10, least)] == [id for id, _ in hits[:5]]
        assert index.search(-rows[3], 10, 0.999) == []

    def test_what_is_removed_is_not_found_and_what_is_added_again_is_replaced(self) -> None:
        index, rows = self.filled(20)
        for place in range(0, 20, 2):
            assert index.remove(str(place))
        assert not index.remove("0")
        assert len(index) == 10
        assert index.scores(rows[0], ["0"]) == [None]
        for place in range(1, 20, 2):
            assert index.search(rows[place], 1)[0][0] == str(place)
        assert {id for id, _ in index.search(rows[0], 20)} == {str(place) for place in range(1, 20, 2)}
        index.add("1", rows[0])
        assert len(index) == 10
        ((id, score),) = index.search(rows[0], 1)
        assert (id, score) == ("1", pytest.approx(1.0, abs=5e-3))

    def test_wrong_dimension_names_both(self) -> None:
        index = self.make(self.dim)
        for call in (lambda v: index.add("a", v), lambda v: index.search(v, 1)):
            with pytest.raises(ConfigError, match=rf"25.*dimension {self.dim}"):
                call(np.ones(25, dtype=np.float32))
        assert len(index) == 0

    @pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
    def test_a_vector_without_direction_is_refused(self, value: float) -> None:
        index = self.make(self.dim)
        bad = np.full(self.dim, value, dtype=np.float32)
        for call in (lambda: index.add("a", bad), lambda: index.search(bad, 1)):
            with pytest.raises(InputError, match="no direction"):
                call()
        assert len(index) == 0
