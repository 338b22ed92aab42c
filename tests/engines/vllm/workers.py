"""Workers of vLLM that are slow, or killed, at a chosen moment; nothing else of them is changed.

Delays and moments stand in the environment, which vLLM's worker processes inherit.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import WorkerExtension
from dejakv.engines.vllm.transfers.loads import LoadRunner
from dejakv.store import changes
from dejakv.store.store import Store

DELAYS = "DEJAKV_TEST_DELAYS"
SLOW = "workers.SlowWorker"
DEATH = "DEJAKV_TEST_DEATH"
DYING = "workers.DyingWorker"


class Delays:
    """Seconds for calls of the store, in files that vLLM's worker process reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {DELAYS: str(self.folder)}

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
        delays = Delays(Path(os.environ[DELAYS]))
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


@dataclass(frozen=True)
class Death:
    """Which rank dies, and when: at the `number`th such moment (`MOMENTS`), once the other rank is as far as stands there.

    folder  where the workers leave files: `process-PID`, `there-NUMBER` of the rank that goes on, and `died`
    """

    rank: int
    moment: str
    number: int
    folder: str

    @classmethod
    def in_folder(cls, folder: Path, rank: int, moment: str, number: int) -> "Death":
        """With a new folder."""
        folder.mkdir()
        return cls(rank, moment, number, str(folder))

    @property
    def environment(self) -> dict[str, str]:
        return {DEATH: json.dumps(asdict(self))}

    @property
    def came(self) -> bool:
        """Whether it was this that killed the rank."""
        return (Path(self.folder) / "died").exists()

    def workers(self) -> list[int]:
        """The ids of the processes."""
        return [int(path.name.removeprefix("process-")) for path in Path(self.folder).glob("process-*")]


@dataclass(frozen=True)
class Moment:
    """`dies`: the call before which one rank dies. `there`: the call that the other one has come back from by then."""

    dies: tuple[Any, str]
    there: tuple[Any, str]
    counts: Callable[[Any], bool] = bool


MOMENTS = {
    # All of a prompt's files have their names, and no catalog lists them yet: its transaction ends later.
    "published": Moment((changes, "add_entry"), (Store, "put")),
    # The other rank has said that its blend may begin, and waits.
    "fetching": Moment((LoadRunner, "_make_draft"), (LoadRunner, "take_news"), lambda told: bool(told[0])),
}


class DyingWorker(WorkerExtension):
    """Dies by SIGKILL at the moment that stands in its environment."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        death = Death(**json.loads(os.environ[DEATH]))
        folder, moment = Path(death.folder), MOMENTS[death.moment]
        (folder / f"process-{os.getpid()}").touch()

        def die(number: int) -> None:
            if upstream.rank() == death.rank and number == death.number:
                while not (folder / f"there-{number}").exists():
                    time.sleep(0.01)
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def there(number: int) -> None:
            if upstream.rank() != death.rank:
                (folder / f"there-{number}").touch()

        _count(*moment.there, moment.counts, there)
        _count(*moment.dies, None, die)
        return super().__new__(cls)


def _count(owner: Any, name: str, counts: Callable[[Any], bool] | None, then: Callable[[int], None]) -> None:
    """Has each call counted: after it where `counts` says so of its result, before it without."""
    numbers, original = count(1), getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if counts is None:
            then(next(numbers))
        result = original(*args, **kwargs)
        if counts is not None and counts(result):
            then(next(numbers))
        return result

    setattr(owner, name, counted)
