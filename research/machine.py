"""The spread of figures of a benchmark, and what stands beside them."""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.experiments.machine import machine, versions
from dejakv.experiments.machine import measured as made

__all__ = ["machine", "measured", "spread", "versions"]


def measured(module: str) -> dict[str, Any]:
    """Return this process's command line as `python -m module`, the time, machine and versions."""
    return {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), **made()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the 10th, 50th and 90th percentile."""
    return {f"p{share}": float(np.percentile(values, share)) for share in (10, 50, 90)}
