"""A progress bar over a run, and one line a sample for those who ask."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dejakv.experiments.run import RunResult, run
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import Row


def run_with_progress(settings: RunSettings, log_samples: bool) -> RunResult:
    """Runs with a bar on standard error, so that standard output holds the report alone."""
    quiet_loading()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{settings.model} ({settings.cache_mode})", total=settings.max_samples)

        def advance(done: int, total: int, row: Row) -> None:
            bar.update(task, completed=done, total=total)
            if log_samples:
                console.print(line_of(row), markup=False, highlight=False, soft_wrap=True)

        return run(settings, advance)


def quiet_loading() -> None:
    """transformers' own bar over the weights would stand in the middle of ours."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def line_of(row: Row) -> str:
    """`[id] hit (embedding:prompt) | latency=0.032s | answer match=True | exact_text=miss, ...`"""
    arm = "cache" if "cache" in row.arms else next(iter(row.arms))
    record = row.arms[arm].record
    statuses = ", ".join(f"{name}={status}" for name, status in record.statuses.items())
    head = f"[{row.sample_id}] {record.provenance} | latency={record.latency_ms / 1e3:.3f}s"
    return f"{head} | answer match={row.correct(arm)} | {statuses}"
