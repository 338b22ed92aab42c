"""Conformance suite of levels. Subclass it, define `make`, and let pytest collect it.

The suite of a level of one's own, with queries of which only equal topics may match:

    class TestMine(LevelTests):
        def make(self) -> Level: return MyLevel()
        def query(self, topic: int, space: str = "s") -> Query: ...
"""

import pytest

from dejakv.decide.levels.base import Level, Query
from dejakv.request import Request


class LevelTests:
    """Tests of every level. Two queries match if and only if they are of one topic and space."""

    def make(self) -> Level:
        """Make an empty level."""
        raise NotImplementedError("a conformance suite needs `make`: return an empty level")

    def query(self, topic: int, space: str = "s") -> Query:
        """Make a query of a topic in a space."""
        return Query(Request(id="r", prompt=f"question {topic}", chunk=f"question {topic}"), space)

    @pytest.fixture
    def level(self) -> Level:
        """Return the level under test."""
        return self.make()

    def donors(self, level: Level, query: Query) -> list[str]:
        """Return the donors that a search finds, best first."""
        return [match.donor for match in level.search(query).matches]

    def test_it_reports_a_status_of_hit_miss_or_skip(self, level: Level) -> None:
        """Check the statuses of a miss and of a hit."""
        search = level.search(self.query(1))
        assert (search.matches, len(level)) == ((), 0)
        assert search.statuses, "every level reports a status"
        assert "hit" not in search.statuses.values()
        level.add("one", self.query(1))
        level.add("two", self.query(2))
        search = level.search(self.query(2))
        assert search.matches[0].donor == "two"

        assert "hit" in search.statuses.values()
        assert search.matches[0].level in search.statuses or search.matches[0].level.startswith(
            "embedding:"
        )

    def test_topics_and_spaces_do_not_see_each_other(self, level: Level) -> None:
        """Check that neither another topic nor another space matches."""
        level.add("one", self.query(1, "tenant a"))
        assert self.donors(level, self.query(2, "tenant a")) == []
        assert self.donors(level, self.query(1, "tenant b")) == []
        assert self.donors(level, self.query(1, "")) == []
        assert self.donors(level, self.query(1, "tenant a")) == ["one"]

    def test_adding_and_removing_are_idempotent_and_complete(self, level: Level) -> None:
        """Check that a donor added again counts once, and that an absent one may be removed."""
        for _ in range(3):
            level.add("one", self.query(1))
        assert len(level) == 1
        assert self.donors(level, self.query(1)) == ["one"]
        level.add("two", self.query(1))

        # Evictions and purges may both ask for the same donor.
        for donor in ("one", "one", "never added"):
            level.remove(donor)
        assert len(level) == 1
        assert self.donors(level, self.query(1)) == ["two"]
        level.remove("two")
        assert self.donors(level, self.query(1)) == []

    def test_a_donor_added_anew_moves(self, level: Level) -> None:
        """Check that a donor is in its last topic and space alone."""
        level.add("one", self.query(1, "a"))
        level.add("one", self.query(2, "b"))
        assert len(level) == 1
        assert self.donors(level, self.query(1, "a")) == []
        assert self.donors(level, self.query(2, "b")) == ["one"]

    def test_matches_are_best_first_and_bounded(self, level: Level) -> None:
        """Check order, number and range of the scores."""
        for donor in range(30):
            level.add(f"d{donor}", self.query(1))
        scores = [match.score for match in level.search(self.query(1)).matches]
        # A cache weighs every match, so a level must not return all.
        assert 1 <= len(scores) <= 16
        assert scores == sorted(scores, reverse=True)
        assert all(-1.0001 <= score <= 1.0001 for score in scores)

    def test_empty_text_matches_nothing(self, level: Level) -> None:
        """Check that an empty text is skipped."""
        empty = Query(Request(id="r", prompt="", chunk=" "), "s")
        level.add("empty", empty)
        search = level.search(empty)
        assert search.matches == ()
        assert set(search.statuses.values()) == {"skip"}
