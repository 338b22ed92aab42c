"""Distance from full computation."""

import math
from typing import Any

import numpy as np
import pytest

from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import SampleFidelity, fidelity, means


def test_divergence_and_agreement_by_hand() -> None:
    wanted = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], np.float32))
    got = np.log(np.array([[0.25, 0.75], [0.6, 0.4], [0.7, 0.3]], np.float32))
    found = fidelity(wanted, got)
    assert found is not None
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert found.top1 == pytest.approx(1 / 3)  # a tie goes to the first token, in both


def test_nothing_to_compare_is_none() -> None:
    assert fidelity(None, np.zeros((1, 2), np.float32)) is None
    assert fidelity(np.zeros((1, 2), np.float32), None) is None
    assert means([]) == {"kl_mean": None, "top1": None}
    assert means([SampleFidelity(0.2, 1.0), SampleFidelity(0.4, 0.5)]) == {"kl_mean": pytest.approx(0.3), "top1": 0.75}


def test_a_run_says_how_near_it_stayed(docs_engine: Any) -> None:
    settings = settings_from("docs", {"max_samples": 30, "dtype": "fp32"}, {"reuse": "exact"})
    result = run(settings, engine=docs_engine)
    summary = result.summary
    assert summary["kl_mean"] < 1e-6  # exact reuse
    assert summary["top1"] == 1.0
    assert all(row.arms["none"].fidelity == SampleFidelity(0.0, 1.0) for row in result.rows)
