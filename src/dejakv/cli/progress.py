"""Progress of long work: a bar on a terminal, a line every ten seconds in a log. Nothing goes to standard output."""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from dejakv.experiments.summary import Progress, Row

LOG_SECONDS = 10.0


@contextmanager
def watching(
    console: Console,
    *,
    log_samples: bool = False,
    seconds: float = LOG_SECONDS,
    counts: str = "samples",
    always_lines: bool = False,
) -> Generator[Progress, None, None]:
    """A watch for the console: a bar on a terminal, otherwise a line for each stage and one every `seconds`.

    counts        the noun of what is done one after the other
    always_lines  no bar, for commands that print results meanwhile
    """
    if console.is_terminal and not always_lines:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
        )  # fmt: skip
        with ProgressBar(*columns, console=console, transient=True) as bar:
            yield _Bar(bar, console, log_samples)
        return
    yield _Lines(console, log_samples, counts, seconds)


class _Terminal(Progress):
    """Prints samples if asked to, and keeps the mean time to first token of each arm since the stage began."""

    def __init__(self, console: Console, log_samples: bool) -> None:
        self._console = console
        self._log_samples = log_samples
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def stage(self, text: str) -> None:
        self._times.clear()

    def sample(self, done: int, total: int, row: Row | None) -> None:
        if row is None:
            return
        for name, outcome in row.arms.items():
            self._times[name].append(outcome.record.ttft_ms)
        if self._log_samples:
            self._print(line_of(row))

    @property
    def _figures(self) -> str:
        means = ", ".join(f"{name} {fmean(times):.0f}" for name, times in self._times.items())
        return f"mean TTFT ms: {means}" if means else ""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(_Terminal):
    """Moves a bar."""

    def __init__(self, bar: ProgressBar, console: Console, log_samples: bool) -> None:
        super().__init__(console, log_samples)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, figures="")

    def stage(self, text: str) -> None:
        super().stage(text)
        self._bar.update(self._task, description=text)

    def sample(self, done: int, total: int, row: Row | None) -> None:
        super().sample(done, total, row)
        self._bar.update(self._task, completed=done, total=total, figures=self._figures)


class _Lines(_Terminal):
    """Prints lines: each stage, and after a sample how far it is, if the last such line is old enough."""

    def __init__(self, console: Console, log_samples: bool, counts: str, seconds: float) -> None:
        super().__init__(console, log_samples)
        self._counts = counts
        self._seconds = seconds
        self.stage("")

    def stage(self, text: str) -> None:
        super().stage(text)
        self._began = self._printed = time.monotonic()
        self._before: int | None = None
        if text:
            self._print(text)

    def sample(self, done: int, total: int, row: Row | None) -> None:
        super().sample(done, total, row)
        if self._before is None:
            self._before = done - 1
        now = time.monotonic()
        if now - self._printed >= self._seconds:
            self._printed = now
            left = (now - self._began) / max(1, done - self._before) * (total - done)
            figures = f"; {self._figures}" if self._figures else ""
            self._print(f"{done} of {total} {self._counts}, about {left:.0f} s left{figures}")


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
