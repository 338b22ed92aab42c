"""Where the experiments of a sweep run: in this process, or in several. A cluster would be one more `Runner`."""

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from dejakv.errors import DejaKVError
from dejakv.experiments.plain_words import counted
from dejakv.experiments.run import run
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.watch import Watch

logger = logging.getLogger(__name__)


class Experiment(NamedTuple):
    """One run of a sweep."""

    name: str
    settings: RunSettings
    notes: str


class Done(NamedTuple):
    """A finished experiment: its summary, or the reason why it has none."""

    experiment: Experiment
    summary: dict[str, Any] | None
    error: str = ""


class Runner(Protocol):
    """Runs experiments and yields each when it is done, in any order.

    before  is called in this process right before an experiment begins; what it raises ends the sweep
    """

    def results(self, planned: Sequence[Experiment], before: Callable[[Experiment], None]) -> Iterator[Done]: ...


def carry_out(experiment: Experiment, watch: Watch | None = None) -> Done:
    """Runs one experiment here. A failure of any kind is a result, so that the others still run.

    Raises: KeyboardInterrupt if the run was interrupted: what it measured so far is no result of the sweep.
    """
    try:
        result = run(experiment.settings, watch)
    except DejaKVError as error:
        return Done(experiment, None, " ".join(str(error).split()))
    except Exception as error:  # an experiment may run foreign code; its failure is its own row
        logger.exception("the experiment %r failed", experiment.name)
        return Done(experiment, None, " ".join(f"unexpected {type(error).__name__}: {error}".split()))
    if result.stopped:
        raise KeyboardInterrupt
    return Done(experiment, result.summary)


class Here:
    """One experiment after the other, in this process."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def results(self, planned: Sequence[Experiment], before: Callable[[Experiment], None]) -> Iterator[Done]:
        for number, experiment in enumerate(planned, 1):
            before(experiment)
            self._watch.stage(f"{experiment.name}, {number} of {len(planned)}")
            yield carry_out(experiment, self._watch)


class Processes:
    """Several experiments at a time, each in a process that is used again for the next one. They end with this process, even if
    it is killed. They share the cores, so times of such a sweep are not comparable with those of a single run."""

    def __init__(self, jobs: int, watch: Watch) -> None:
        self._jobs = jobs
        self._watch = watch

    def results(self, planned: Sequence[Experiment], before: Callable[[Experiment], None]) -> Iterator[Done]:
        waiting: queue.SimpleQueue[Experiment] = queue.SimpleQueue()
        for experiment in planned:
            waiting.put(experiment)
        done: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        workers = [_Worker(self._jobs) for _ in range(min(self._jobs, len(planned)))]
        threads = [threading.Thread(target=_feed, args=(one, waiting, before, done), daemon=True) for one in workers]
        try:
            for thread in threads:
                thread.start()
            self._watch.stage(f"{counted(len(planned), 'experiment')}, {self._jobs} at a time")
            for number in range(1, len(planned) + 1):
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                self._watch.sample(number, len(planned), None)
                yield result
        finally:
            for worker in workers:
                worker.kill()
            for thread in threads:
                thread.join()
            for worker in workers:
                worker.close()


class _Worker:
    """A process of `sweep_worker`, started when it is needed and again after its death."""

    def __init__(self, jobs: int) -> None:
        self._environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def carry_out(self, experiment: Experiment) -> Done:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        task = {"name": experiment.name, "settings": experiment.settings.named()}
        try:
            process.stdin.write(json.dumps(task, default=str) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.endswith("\n"):
            return Done(experiment, None, f"its process ended unexpectedly ({_end_of(process)})")
        found = json.loads(answer)
        return Done(experiment, found["summary"], found["error"])

    def kill(self) -> None:
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Closes the pipes of a process that has ended."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # pyright: ignore[reportOptionalMemberAccess]

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dejakv.experiments.sweep_worker"], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, text=True, env=self._environment, start_new_session=True,
                )  # fmt: skip
            return self._process


def _feed(
    worker: _Worker, waiting: "queue.SimpleQueue[Experiment]", before: Callable[[Experiment], None],
    done: "queue.SimpleQueue[Done | BaseException]",
) -> None:  # fmt: skip
    try:
        while True:
            experiment = waiting.get_nowait()
            before(experiment)
            done.put(worker.carry_out(experiment))
    except queue.Empty:
        return
    except BaseException as error:  # it is raised in the thread that waits for results
        done.put(error)


def _end_of(process: "subprocess.Popen[str]") -> str:
    code = process.wait()
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, perhaps for lack of memory: give fewer --jobs" if name == "SIGKILL" else name
