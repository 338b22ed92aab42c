"""A worker of vLLM whose store takes as long as a test says, from one moment to the next, and whose weights can be shifted."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from dejakv.engines.vllm.bind import WorkerExtension
from dejakv.store.store import Store

FOLDER = "DEJAKV_TEST_DELAYS"
EXTENSION = "slow_worker.SlowWorker"


class Delays:
    """Seconds for calls of the store, in files that vLLM's worker process reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {FOLDER: str(self.folder)}

    def set(self, **seconds: float) -> None:
        for name, value in seconds.items():
            (self.folder / name).write_text(str(value))

    @property
    def waiting(self) -> bool:
        """Whether a read waits now."""
        return (self.folder / "waits").exists()

    @property
    def stored(self) -> int:
        """How many calls of `put` came back."""
        file = self.folder / "stored"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def spend(self, name: str) -> None:
        file = self.folder / name
        seconds = float(file.read_text() or 0) if file.exists() else 0.0
        if seconds:
            (self.folder / "waits").touch()
            time.sleep(seconds)
            (self.folder / "waits").unlink(missing_ok=True)


class SlowWorker(WorkerExtension):
    """Adds the delays to its store, and one method for `/collective_rpc`."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        delays = Delays(Path(os.environ[FOLDER]))
        for name in ("put", "get_parts"):
            setattr(Store, name, _delayed(delays, name, getattr(Store, name)))
        return super().__new__(cls, *given, **named)

    def shift_weights(self) -> None:
        with torch.inference_mode():
            for value in self.model_runner.get_model().parameters():  # type: ignore[attr-defined]
                if value.is_floating_point() and value.numel() > 1:
                    value.data.mul_(1.01)


def _delayed(delays: Delays, name: str, real: Any) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        delays.spend(name)
        result = real(*given, **named)
        if name == "put":
            with (delays.folder / "stored").open("a") as file:
                file.write(f"{given[1].meta.id}\n")
        return result

    return call
