"""The bound holds: simulated streams at the worst case, looked at after every label.

A rule that breaks the bound opens with probability alpha at most. Each test runs 2,000 streams from a fixed seed and allows what such a
probability exceeds once in 1,000 tries.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from research.bound import replayed
from scipy.stats import binom

from dejakv.trust.evidence import ClassEvidence, EvidenceTerms
from dejakv.trust.features import LATE_CUTOFFS
from dejakv.trust.rules import LONG_TRY

STREAMS = 2000
ALPHA = 0.05
MOST = int(binom.ppf(0.999, STREAMS, ALPHA))


def terms(delta: float, explore: float = 1.0, audit: float = 0.02) -> EvidenceTerms:
    return EvidenceTerms(delta, -np.log(ALPHA), explore, audit)


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "explore", "steps"), [(0.05, 1.0, 400), (0.2, 0.5, 250), (0.01, 1.0, 450)])
def test_at_exactly_the_bound_few_streams_ever_open(delta: float, explore: float, steps: int) -> None:
    random = np.random.default_rng(1)
    risks = random.random((STREAMS, steps))
    found = replayed(risks, random.random((STREAMS, steps)) < delta, terms(delta, explore), random)
    assert np.sum(found.cutoff.max(axis=1) > 0) <= MOST


@pytest.mark.parametrize(("explore", "audit"), [(1.0, 0.1), (0.6, 0.6), (0.5, 1.0)])
def test_a_good_rule_opens_no_bad_one_with_mixed_shares(explore: float, audit: float) -> None:
    """Risks up to .3 are never wrong. Those above are so often wrong that a rule up to .5 has exactly the bound."""
    delta, steps, random = 0.15, 300, np.random.default_rng(2)
    risks = random.choice([0.1, 0.5, 1.0], p=[0.3, 0.3, 0.4], size=(STREAMS, steps))
    wrong = random.random(risks.shape) < np.where(risks == 0.1, 0, 2 * delta)
    found = replayed(risks, wrong, terms(delta, explore, audit), random)
    cutoff = found.cutoff.max(axis=1)
    assert np.sum(cutoff >= 0.1) > 0.5 * STREAMS  # the good rule does open
    assert np.sum(cutoff >= 0.5) <= MOST


def test_power_with_half_of_the_bound() -> None:
    """Half of delta = 5% wrong: half of the streams open within 450 labels; 375 is the least that any test needs on average."""
    random = np.random.default_rng(3)
    risks = np.ones((500, 470))
    found = replayed(risks, random.random(risks.shape) < 0.025, terms(0.05), random)
    assert np.mean(found.cutoff.max(axis=1) > 0) > 0.5


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, 2**32), st.sampled_from([0.05, 0.3]), st.sampled_from([0.0, 0.02, 0.6]),
    st.sampled_from([(1.0, 0.3), (0.4, 0.9), (1.0, 1.0)]), st.sampled_from([(), LATE_CUTOFFS]),
)  # fmt: skip
def test_many_streams_at_once_do_what_one_state_does(
    seed: int, delta: float, rate: float, shares: tuple[float, float], fixed: tuple[float, ...]
) -> None:
    random = np.random.default_rng(seed)
    orders, steps, asked = 2, 260, terms(delta, *shares)
    risks = random.choice([0.0, 0.1, 0.3, 0.7, 1.0], size=(orders, steps))
    wrong = random.random(risks.shape) < rate * risks
    wrong[:, 200:] |= random.random((orders, 60)) < 0.9  # drift
    times = random.choice([0.0, 0.25, 0.6, 2.0], p=[0.7, 0.1, 0.1, 0.1], size=risks.shape)
    found = replayed(risks, wrong, asked, np.random.default_rng(seed), times, fixed)
    chances = np.random.default_rng(seed).random(risks.shape)
    for order in range(orders):
        state = ClassEvidence().ruled(fixed) if fixed else ClassEvidence()
        for step in range(steps):
            risk, took = float(risks[order, step]), float(times[order, step])
            cutoff = most = -1.0
            served = labelled = alarmed = False
            if state.cutoffs:
                if state.opened:
                    cutoff = state.cutoffs[state.opened - 1]
                    most = LONG_TRY if state.opened < len(state.cutoffs) else np.inf
                served = risk <= cutoff and took < most
                labelled = bool(
                    chances[order, step] < ((1.0 if state.warned else asked.audit) if served else asked.explore)
                )
            now = state
            if not state.cutoffs:
                now = state.piloted(risk)
            elif labelled:
                now = state.learned(
                    state.round, risk, state.opened, bool(wrong[order, step]), asked,
                    warned=state.warned, time=took,
                )  # fmt: skip
                alarmed = now.counts.alarms > state.counts.alarms
            parts = (found.served, found.labelled, found.cutoff, found.time, found.alarms)
            assert [part[order, step] for part in parts] == [served, labelled, cutoff, most, alarmed]
            state = now.ruled(fixed) if fixed else now
