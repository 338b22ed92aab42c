"""A worker of vLLM that is killed at a chosen moment. What kills it is SIGKILL; nothing else of it is changed.

The moment stands in the environment, which vLLM's worker processes inherit.
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

from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import WorkerExtension
from dejakv.engines.vllm.loads import LoadRunner
from dejakv.store import changes
from dejakv.store.store import Store

VARIABLE = "DEJAKV_TEST_DEATH"
EXTENSION = "dying_worker.DyingWorker"


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
        return {VARIABLE: json.dumps(asdict(self))}

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
    "published": Moment((changes, "add_record"), (Store, "put")),
    # The other rank has said that its blend may begin, and waits.
    "fetching": Moment((LoadRunner, "_drafted"), (LoadRunner, "take"), lambda told: bool(told[0])),
}


class DyingWorker(WorkerExtension):
    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        death = Death(**json.loads(os.environ[VARIABLE]))
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
