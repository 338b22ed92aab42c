"""How long tests run: a little in CI, longer with `DEJAKV_SOAK_ROUNDS`, from `DEJAKV_SOAK_SEED` on, and those marked `soak`
no longer than `DEJAKV_SOAK_MINUTES` together. `make soak` sets all three."""

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings


def rounds(examples: int) -> Callable[[Any], Any]:
    """Decorates a Hypothesis test: `examples` times `DEJAKV_SOAK_ROUNDS`, with `DEJAKV_SOAK_SEED` if it is set."""
    factor = soak_rounds()
    number = os.environ.get("DEJAKV_SOAK_SEED")
    bounded = settings(
        max_examples=examples * factor, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: bounded(seed(int(number))(test) if number is not None else test)


def soak_rounds() -> int:
    """How many times a long run does what it promises."""
    return int(os.environ.get("DEJAKV_SOAK_ROUNDS", "1"))


def soak_seed() -> int:
    """Where a long run begins; printed by `make soak`."""
    return int(os.environ.get("DEJAKV_SOAK_SEED", "1"))


def deadline(share: float) -> float:
    """When a long run that may take this share of the minutes stops, by `time.monotonic()`."""
    return time.monotonic() + 60 * share * float(os.environ.get("DEJAKV_SOAK_MINUTES", "60"))
