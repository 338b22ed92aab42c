"""Distance from full computation, and the noise floor beside it."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from dejakv.experiments.fidelity import Fidelity, fidelity, means, noise_floor
from dejakv.experiments.plain_words import bound_in_words
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.request import Request, Sampling
from dejakv.trust.gate import Gate
from dejakv.trust.settings import TrustSettings


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
    assert means([Fidelity(0.2, 1.0), Fidelity(0.4, 0.5)]) == {"kl_mean": pytest.approx(0.3), "top1": 0.75}


def test_a_run_says_how_near_it_stayed(docs_engine: Any) -> None:
    settings = settings_from("docs", {"max_samples": 30, "noise_floor": 2, "dtype": "fp32"}, {"reuse": "exact"})
    result = run(settings, engine=docs_engine)
    summary = result.summary
    assert summary["kl_mean"] < 1e-6  # exact reuse
    assert summary["top1"] == 1.0
    assert summary["noise_floor"]["samples"] == 2
    assert summary["noise_floor"]["dtype"] == "bfloat16"
    assert 0.0 < summary["noise_floor"]["kl_mean"] < 0.1
    assert 0.0 <= summary["noise_floor"]["wrong"] <= 1.0
    assert all(row.arms["none"].fidelity == Fidelity(0.0, 1.0) for row in result.rows)


def test_an_engine_without_a_twin_has_no_noise_floor(docs_engine: Any) -> None:
    request = Request("r", "Ann lives in Paris.", "", sampling=Sampling(2))
    assert noise_floor(object(), [request]) is None
    assert noise_floor(docs_engine, []) is None


def test_the_noise_floor_stands_beside_the_bound() -> None:
    trust = asdict(Gate(TrustSettings(error_bound=0.05)).report())
    noise = {"wrong": 0.25, "dtype": "bfloat16", "samples": 4}
    assert len(bound_in_words(trust)) == 1
    plain, beside = bound_in_words(trust, noise)
    assert plain == bound_in_words(trust)[0], "nothing is subtracted"
    assert "not subtracted: by the same measure 25.0% of the answers in bfloat16" in beside
