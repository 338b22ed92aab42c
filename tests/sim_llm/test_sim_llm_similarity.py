"""What counts as similar, and a threshold learnt from labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.errors import ConfigError, InputError
from dejakv.experiments.scoring import wilson
from dejakv.sim_llm import AdaptiveThreshold
from dejakv.sim_llm.tasks import TaskSimilarity

TABLE = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)


def rows(ids):
    return TABLE[list(ids)]


def test_the_mean_does_not_see_order_and_positions_do():
    mean, position = TaskSimilarity("mean", rows), TaskSimilarity("position", rows)
    one, other = (1, 2, 3, 4), (4, 3, 2, 1)
    assert float(mean.embed(one, "") @ mean.embed(other, "")) == pytest.approx(1.0, abs=1e-6)
    assert position.score(one, one, 1.0) == pytest.approx(1.0, abs=1e-6)
    assert position.score(one, other, 1.0) < 0.7


def test_positions_punish_other_lengths():
    position = TaskSimilarity("position", rows)
    assert position.score((1, 2), (1, 2, 3, 4), 1.0) == pytest.approx(0.5, abs=1e-6)
    assert position.score((), (1,), 1.0) == 0.0


def test_a_sentence_encoder_embeds_the_text():
    class Encoder:
        dim = 3

        def encode(self, text):
            return np.full(3, len(text), np.float32)

    similarity = TaskSimilarity("sentence", rows, Encoder())
    assert similarity.dim == 3
    assert similarity.embed((1,), "four").tolist() == [4.0] * 3


def test_a_threshold_starts_where_it_is_told_and_falls_with_right_answers():
    threshold = AdaptiveThreshold(max_error=0.1, start=0.95)
    assert threshold.value == 0.95
    for _ in range(60):
        threshold.observe(0.7, True)
    assert threshold.value == 0.7


def test_wrong_answers_raise_it_above_their_similarity():
    threshold = AdaptiveThreshold(max_error=0.1)
    for _ in range(60):
        threshold.observe(0.7, False)
        threshold.observe(0.9, True)
    assert threshold.value == 0.9


@given(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), max_size=60), st.floats(0.01, 0.5))
def test_the_bound_holds_at_every_learnt_threshold(labels, most):
    threshold = AdaptiveThreshold(max_error=most, start=0.95)
    for score, right in labels:
        threshold.observe(score, right)
    value = threshold.value
    above = [right for score, right in labels if score >= value]
    if above and value in {score for score, _ in labels}:
        assert value == 0.95 or wilson(above.count(False), len(above))[1] <= most
    else:
        assert value == 0.95


@pytest.mark.parametrize("settings", [{"max_error": 0}, {"max_error": 1}, {"start": 1.5}, {"window": 0}])
def test_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AdaptiveThreshold(**settings)


def test_a_label_needs_a_cosine():
    with pytest.raises(InputError, match="no cosine"):
        AdaptiveThreshold().observe(7, True)
