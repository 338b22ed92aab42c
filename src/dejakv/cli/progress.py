"""Progress of long work, which never goes to standard output.

It is a bar on a terminal, and elsewhere a line for each stage and one every ten seconds.
"""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dejakv.errors import printable
from dejakv.experiments.summary import RunProgress, SampleRow

LOG_SECONDS = 10.0


@contextmanager
def watching(
    console: Console,
    *,
    log_samples: bool = False,
    seconds: float = LOG_SECONDS,
    counts: str = "samples",
) -> Generator[RunProgress, None, None]:
    """Make a progress display on the console.

    Parameters
    ----------
    console : Console
        Where it is shown.
    log_samples : bool
        Whether to print a line for each finished sample.
    seconds : float
        Seconds between two lines of a stage, where there is no terminal.
    counts : str
        Noun of the counted units.
    """
    # A bar in a file would be a line for each of its movements.
    if not console.is_terminal:
        yield _ProgressLines(console, log_samples, seconds, counts)
        return

    first, last = TextColumn("{task.description}"), TextColumn("{task.fields[means]}")
    columns = (first, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), last)
    with Bars(*columns, console=console, transient=True) as bars:
        yield _ProgressBar(console, log_samples, bars)


class _ArmMeans(RunProgress):
    """Mean time to first token of each arm in a stage; prints samples if asked to."""

    def __init__(self, console: Console, log_samples: bool) -> None:
        self._console, self._log_samples = console, log_samples
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def stage(self, text: str) -> None:
        """Forget the times of the stage before."""
        self._times.clear()

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        """Note the times of a row, and print the row if asked to."""
        if row is not None:
            for name, outcome in row.arms.items():
                self._times[name].append(outcome.record.ttft_ms)
            if self._log_samples:
                self._print(line_of(row))

    @property
    def means(self) -> str:
        """Means of the stage: `mean TTFT ms: prefix 812, cache 401`, or empty without answers."""
        means = ", ".join(f"{name} {fmean(times):.0f}" for name, times in self._times.items())
        return f"mean TTFT ms: {means}" if means else ""

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class _ProgressBar(_ArmMeans):
    """Bar for the stage under way, with its remaining time and the means."""

    def __init__(self, console: Console, log_samples: bool, bars: Bars) -> None:
        super().__init__(console, log_samples)
        self._bars = bars
        self._stage: TaskID | None = None

    def stage(self, text: str) -> None:
        """Begin a bar in place of the one before."""
        super().stage(text)
        if self._stage is not None:
            # One bar at a time, as a stage begins when the one before is over.
            self._bars.remove_task(self._stage)
        self._stage = self._bars.add_task(escape(printable(text)), total=None, means="")

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        """Move the bar."""
        super().sample(done, total, row)
        if self._stage is not None:
            self._bars.update(self._stage, completed=done, total=total, means=self.means)


class _ProgressLines(_ArmMeans):
    """Lines for each stage, for how far it is and the means."""

    def __init__(self, console: Console, log_samples: bool, seconds: float, counts: str) -> None:
        super().__init__(console, log_samples)
        self._seconds, self._counts = seconds, counts
        self.stage("")

    def stage(self, text: str) -> None:
        """Print the stage, and begin to measure it."""
        super().stage(text)
        self._since = self._printed = time.monotonic()
        self._first: int | None = None
        if text:
            self._print(text)

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        """Print how far the stage is, if the last line is old enough."""
        super().sample(done, total, row)
        now = time.monotonic()
        # The first sample loads things, so that its time tells nothing about the others.
        if self._first is None:
            self._first, self._since = done, now
        if now - self._printed >= self._seconds:
            self._printed = now
            text = f"{done} of {total} {self._counts}"
            if done > self._first:
                remaining_seconds = (now - self._since) / (done - self._first) * (total - done)
                text += f", about {remaining_seconds:.0f} s left"

            self._print(f"{text}; {self.means}" if self.means else text)


def line_of(row: SampleRow) -> str:
    """Return a line on a sample, with the reason for state that was not used.

    It reads `[id] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss,
    ...`.
    """
    if row.error:
        return f"[{row.sample_id}] could not run: {row.error}"

    arm = "cache" if "cache" in row.arms else next(iter(row.arms))
    record = row.arms[arm].record
    statuses = ", ".join(f"{name}={status}" for name, status in record.statuses.items())
    head = f"[{row.sample_id}] {record.provenance} | latency={record.latency_ms / 1e3:.3f}s"
    unused = f" | not used: {record.refused}" if record.refused else ""
    return f"{head} | answer match={row.correct(arm)} | {statuses}{unused}"
