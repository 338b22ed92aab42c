"""What counts as similar."""

import numpy as np
import pytest

from dejakv.sim_llm.tasks import TaskSimilarity

TABLE = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)


def rows(ids):
    return TABLE[list(ids)]


def test_the_mean_does_not_see_order_and_positions_do():
    mean, position = TaskSimilarity("mean", rows), TaskSimilarity("position", rows)
    one, other = (1, 2, 3, 4), (4, 3, 2, 1)
    assert float(mean.embed(one) @ mean.embed(other)) == pytest.approx(1.0, abs=1e-6)
    assert position.score(one, one, 1.0) == pytest.approx(1.0, abs=1e-6)
    assert position.score(one, other, 1.0) < 0.7


def test_positions_punish_other_lengths():
    position = TaskSimilarity("position", rows)
    assert position.score((1, 2), (1, 2, 3, 4), 1.0) == pytest.approx(0.5, abs=1e-6)
    assert position.score((), (1,), 1.0) == 0.0
