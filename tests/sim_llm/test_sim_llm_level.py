"""The level of tasks passes the suite of every level."""

import numpy as np

from dejakv.levels.base import Query
from dejakv.request import Request
from dejakv.sim_llm.level import LAYER, TaskLevel
from dejakv.testing.levels import LevelTests


class TestTaskLevel(LevelTests):
    def make(self) -> TaskLevel:
        return TaskLevel(8, num_hyperplanes=16, seed=42, threshold=0.9)

    def query(self, topic: int, space: str = "s") -> Query:
        vector = np.random.default_rng(topic).standard_normal(8).astype(np.float32)
        return Query(Request(id="", prompt="", chunk=""), space, lambda: {LAYER: vector})


def test_a_query_without_the_vector_is_skipped():
    level = TaskLevel(8, 16, 42, 0.9)
    bare = Query(Request(id="", prompt="", chunk=""), "s")
    level.add("one", bare)
    assert len(level) == 0
    assert level.search(bare).statuses == {LAYER: "skip"}


def test_the_threshold_is_the_levels_own():
    level = TaskLevel(8, 16, 42, 0.9)
    assert level.thresholds == {LAYER: 0.9}
