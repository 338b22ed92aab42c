import math

import numpy as np
import pytest

from dejakv.trust.certainty import certainty, orders


def test_margin_and_entropy_of_a_distribution() -> None:
    logs = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert certainty(logs) == pytest.approx(
        {"first_margin": math.log(2), "first_entropy": -sum(p * math.log(p) for p in (0.1, 0.6, 0.3))}, abs=1e-6
    )


def test_tokens_that_cannot_come_count_for_nothing() -> None:
    sure = certainty(np.array([0.0, -np.inf, -np.inf], np.float32))
    assert sure == {"first_margin": math.inf, "first_entropy": 0.0}


@pytest.mark.parametrize(
    ("differs", "ordered"), [("first", True), ("answer", True), ("tool", True), ("a.b:c", True), ("kl:0.05", False)]
)
def test_it_orders_tokens_and_texts_and_no_distributions(differs: str, ordered: bool) -> None:
    assert orders(differs) is ordered
