"""A run over several seeds: one draw of the samples says little about how many answers change."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dejakv.errors import ConfigError
from dejakv.experiments.earlier_run import REMEDY
from dejakv.experiments.output import SETTINGS, SUMMARY, make_folder, replace_file
from dejakv.experiments.run import RunResult, run
from dejakv.experiments.scoring import wilson
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.watch import Watch

DRAWN = ("shapes", "docs", "repo", "rag", "sessions")
"""Data sets whose samples follow from the seed. Others are shuffled by it."""


@dataclass(frozen=True)
class SeedResults:
    """One result a seed, in order. `stopped`: the last one was interrupted."""

    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]
    output: Path | None

    @property
    def stopped(self) -> bool:
        return bool(self.results) and self.results[-1].stopped


def run_seeds(
    settings: RunSettings, count: int, watch: Watch, *, resume: bool = False, keep_earlier: bool = False
) -> SeedResults:
    """The run with `count` seeds from the settings' one upwards, each with a model loaded anew and an empty cache. With an
    output folder, each seed has a folder in it (`seed-0`), and `summary.json` has the figures of all.

    Raises: ConfigError for fewer than two seeds or a cache folder, and what `run` raises, whose `resume` and `keep_earlier` hold
    for each seed.
    """
    if count < 2:
        raise ConfigError(f"--seeds {count}: give 2 or more, or leave it out for one run")
    if settings.cache.cache_dir is not None or settings.cache.fusion_cache_dir is not None:
        raise ConfigError(
            "--seeds with a cache folder: later seeds would find the state of earlier ones; leave the folder out"
        )
    folder = make_folder(settings.output) if settings.output is not None else None
    if folder is not None and keep_earlier and (folder / SETTINGS).exists():
        raise ConfigError(f"--output {str(folder)!r} has a run with one seed: {REMEDY}")
    seeds = tuple(range(settings.seed, settings.seed + count))
    results: list[RunResult] = []
    for number, seed in enumerate(seeds):
        watch.stage(f"seed {seed}, {number + 1} of {count}")
        shuffle = settings.shuffle_seed
        if shuffle is not None or settings.dataset not in DRAWN:
            shuffle = (shuffle or 0) + number
        own = str(folder / f"seed-{seed}") if folder is not None else None
        one = replace(settings, seed=seed, shuffle_seed=shuffle, output=own)
        results.append(run(one, watch, resume=resume, keep_earlier=keep_earlier))
        if results[-1].stopped:
            break
    done = SeedResults(seeds[: len(results)], tuple(results), folder)
    if folder is not None:
        replace_file(folder / SUMMARY, json.dumps(pooled(done), indent=2) + "\n", "--output")
    return done


def pooled(done: SeedResults) -> dict[str, Any]:
    """The figures of all seeds together, and each seed's own."""
    summaries = [result.summary for result in done.results]
    samples = sum(summary["samples"] for summary in summaries)
    rows = [_row(seed, summary) for seed, summary in zip(done.seeds, summaries, strict=True)]
    found: dict[str, Any] = {"seeds": rows, "samples": samples}
    for name, wrong, of in (("changed", "changed", "samples"), ("false_hits", "false_hits", "judged")):
        known = [row for row in rows if row[wrong] is not None]
        if known:
            total, trials = sum(row[wrong] for row in known), sum(row[of] for row in known)
            found |= {name: total, f"{name}_of": trials, f"{name}_interval": wilson(total, trials)}
    ratios = [row["ttft_ratio"] for row in rows if row["ttft_ratio"] is not None]
    if ratios:
        found["ttft_ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return found


def _row(seed: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    agreement, beyond = summary.get("agreement"), summary.get("beyond_prefix") or {}
    return {
        "seed": seed,
        "samples": summary["samples"],
        "hit_rate": summary.get("hit_rate"),
        "changed": None if agreement is None else round((1 - agreement) * summary["samples"]),
        "judged": summary.get("judged"),
        "false_hits": summary.get("false_hits"),
        "ttft_ratio": beyond.get("ttft_ratio"),
    }


def show_seeds(done: SeedResults, console: Console | None = None) -> None:
    """Prints a row a seed, and the figures of all seeds in words."""
    console = console or Console()
    figures = pooled(done)
    console.print(_table(figures["seeds"]))
    for name, text in (("changed", "answers changed"), ("false_hits", "false hits")):
        if name in figures:
            low, high = figures[f"{name}_interval"]
            console.print(
                f"{text}: {figures[name]} of {figures[f'{name}_of']} over {len(done.seeds)} seeds"
                f" (95%: {100 * low:.1f}% to {100 * high:.1f}%)",
                soft_wrap=True,
            )
    if "ttft_ratio" in figures:
        ratio = figures["ttft_ratio"]
        console.print(
            f"mean TTFT against prefix caching: {ratio['median']:.2f}x in the middle seed,"
            f" from {ratio['min']:.2f}x to {ratio['max']:.2f}x",
            soft_wrap=True,
        )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="by seed")
    for name in ("seed", "samples", "hit rate", "answers changed", "false hits", "TTFT against prefix"):
        table.add_column(name, justify="right")
    for row in rows:
        rate, ratio = row["hit_rate"], row["ttft_ratio"]
        counts = ["-" if row[name] is None else str(row[name]) for name in ("changed", "false_hits")]
        table.add_row(
            str(row["seed"]), str(row["samples"]), "-" if rate is None else f"{100 * rate:.1f}%", *counts,
            "-" if ratio is None else f"{ratio:.2f}x",
        )  # fmt: skip
    return table
