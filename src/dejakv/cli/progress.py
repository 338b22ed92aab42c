"""Progress of long work: a bar on a terminal, a line every ten seconds in a log. Nothing goes to standard output."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dejakv.experiments.run import RunResult, run
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import Row
from dejakv.experiments.watch import Watch

LOG_SECONDS = 10.0


def run_with_progress(settings: RunSettings, log_samples: bool, resume: bool = False) -> RunResult:
    """Runs with progress on standard error, so that standard output has the report alone."""
    console = Console(stderr=True)
    with watching(console, log_samples=log_samples) as watch:
        return run(settings, watch, resume=resume, keep_earlier=True)


@contextmanager
def watching(
    console: Console,
    *,
    log_samples: bool = False,
    seconds: float = LOG_SECONDS,
    counts: str = "samples",
    always_lines: bool = False,
) -> Generator[Watch, None, None]:
    """A watch for the console: a bar on a terminal, otherwise a line for each stage and one every `seconds`.

    counts        the noun of what is done one after the other
    always_lines  no bar, for commands that print results meanwhile
    """
    if console.is_terminal and not always_lines:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            yield _Bar(bar, console, log_samples)
        return
    lines = _Lines(console, log_samples, counts)
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(seconds):
            lines.show()

    thread = threading.Thread(target=tick, name="dejakv-progress", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        stop.set()
        thread.join()


class _Figures:
    """Mean time to first token of each arm so far."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, row: Row) -> None:
        self._count += not row.error
        for name, outcome in row.arms.items():
            self._sums[name] = self._sums.get(name, 0.0) + outcome.record.ttft_ms

    def __str__(self) -> str:
        if not self._count:
            return ""
        return "mean TTFT ms: " + ", ".join(f"{name} {total / self._count:.0f}" for name, total in self._sums.items())


class _Bar:
    """A watch that moves a bar."""

    def __init__(self, bar: Progress, console: Console, log_samples: bool) -> None:
        self._bar = bar
        self._console = console
        self._log_samples = log_samples
        self._figures = _Figures()
        self._task = bar.add_task("starting", total=None, figures="")

    def stage(self, text: str) -> None:
        """See Watch."""
        self._figures = _Figures()
        self._bar.update(self._task, description=text)

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """See Watch."""
        if row is not None:
            self._figures.add(row)
            if self._log_samples:
                self._console.print(line_of(row), markup=False, highlight=False, soft_wrap=True)
        self._bar.update(self._task, completed=done, total=total, figures=str(self._figures))


class _Lines:
    """A watch that prints lines. `show` is called from its own thread, so a long sample does not silence the log."""

    def __init__(self, console: Console, log_samples: bool, counts: str) -> None:
        self._console = console
        self._log_samples = log_samples
        self._counts = counts
        self._figures = _Figures()
        self._lock = threading.Lock()
        self._stage = "starting"
        self._began = time.monotonic()
        self._first = (0, self._began)
        self._done = self._total = 0

    def stage(self, text: str) -> None:
        """See Watch."""
        with self._lock:
            self._stage = text
            self._first = (0, time.monotonic())
            self._done = self._total = 0
            self._figures = _Figures()
        self._print(text)

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """See Watch."""
        with self._lock:
            if not self._total:
                self._first = (done - 1, self._first[1])
            self._done, self._total = done, total
            if row is not None:
                self._figures.add(row)
        if row is not None and self._log_samples:
            self._print(line_of(row))

    def show(self) -> None:
        """Prints one line: stage, progress, time left, figures so far."""
        with self._lock:
            now = time.monotonic()
            parts = [f"{self._stage}, {now - self._began:.0f} s so far"]
            if self._total:
                before, since = self._first
                left = (now - since) / max(1, self._done - before) * (self._total - self._done)
                parts = [f"{self._done} of {self._total} {self._counts}, about {left:.0f} s left", str(self._figures)]
        self._print("; ".join(part for part in parts if part))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line_of(row: Row) -> str:
    """`[id] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, ...`, and why state that was found
    was not used."""
    if row.error:
        return f"[{row.sample_id}] could not run: {row.error}"
    arm = "cache" if "cache" in row.arms else next(iter(row.arms))
    record = row.arms[arm].record
    statuses = ", ".join(f"{name}={status}" for name, status in record.statuses.items())
    head = f"[{row.sample_id}] {record.provenance} | latency={record.latency_ms / 1e3:.3f}s"
    unused = f" | not used: {record.reason}" if record.reason else ""
    return f"{head} | answer match={row.correct(arm)} | {statuses}{unused}"
