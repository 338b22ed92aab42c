"""What stands beside figures of a benchmark."""

import shlex
import sys
from typing import Any

from dejakv.experiments.machine import machine, versions
from dejakv.experiments.machine import measured as made

__all__ = ["machine", "measured", "versions"]


def measured(module: str) -> dict[str, Any]:
    """This process's command line as one of `python -m module`, the time, the machine, the versions."""
    return {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), **made()}
