"""How long property-based tests run: a little in CI, longer with `DEJAKV_SOAK_ROUNDS`, from `DEJAKV_SOAK_SEED` on."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings


def rounds(examples: int) -> Callable[[Any], Any]:
    """Decorates a Hypothesis test: `examples` times `DEJAKV_SOAK_ROUNDS`, with `DEJAKV_SOAK_SEED` if it is set."""
    factor = int(os.environ.get("DEJAKV_SOAK_ROUNDS", "1"))
    number = os.environ.get("DEJAKV_SOAK_SEED")
    bounded = settings(
        max_examples=examples * factor, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: bounded(seed(int(number))(test) if number is not None else test)
