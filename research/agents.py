"""What agents gain beside prefix caching, and how many of their answers stay the same.

    OMP_NUM_THREADS=1 python -m research.agents [--quick] [--kind KIND]... --output FILE.json

Four kinds of sessions: `sessions` (recorded conversations with tools, cut to the latest messages),
and `reminders`, `compaction` and `subagents` of `research.agent_sessions`. Each request is computed
in full, with prefix caching, and with blends behind the exact prefix, in turns, in float32; the
full computation once more in bf16, to show what rounding alone changes. All requests count. Blended
prompts are computed exactly between requests, untimed, as a server does in idle time.

Of each kind the file has `tokens_by_prefix` and `ttft_by_prefix` (tokens computed and time to the
first token, by prefix caching's), `first_equal` and `whole_equal` (shares of first tokens and whole
answers that are those of full computation), and `whole_equal_bf16` (the share that bf16 keeps).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from research.command import run

KINDS = {
    "sessions": "sessions",
    **{
        kind: f"research.agent_sessions:{kind}" for kind in ("reminders", "compaction", "subagents")
    },
}
"""By kind: the data set."""

REQUESTS, QUICK = 40, 8
PRESET = "sessions"
"""Preset whose settings are used for all kinds."""

COLUMNS = (
    "kind",
    "requests",
    "tokens",
    "first token's time (95%)",
    "first tokens equal",
    "whole answers equal",
    "whole, bf16",
)


def figures_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a kind's figures from the summary of its run; None for what was not measured."""
    beside_prefix, rounding = summary["beyond_prefix"] or {}, summary.get("rounding") or {}
    compared = rounding.get("samples", 0)
    return {
        "requests": summary["samples"],
        "not_run": len(summary["not_run"]),
        "prompt_tokens": summary["arms"]["cache"]["prompt_tokens"],
        "tokens_by_prefix": beside_prefix.get("tokens_ratio"),
        "ttft_by_prefix": beside_prefix.get("ttft_ratio"),
        "ttft_by_prefix_interval": beside_prefix.get("ttft_ratio_interval"),
        "first_equal": summary["agreement_first"],
        "whole_equal": summary["agreement"],
        "first_equal_bf16": rounding["same_first"] / compared if compared else None,
        "whole_equal_bf16": rounding["same"] / compared if compared else None,
        "bf16_requests": compared,
    }


def table(kinds: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for kind, row in kinds.items():
        low, high = row["ttft_by_prefix_interval"] or (None, None)
        cells = (
            kind,
            str(row["requests"]),
            _share(row["tokens_by_prefix"]),
            f"{_share(row['ttft_by_prefix'])} ({_share(low)} to {_share(high)})",
            _share(row["first_equal"]),
            _share(row["whole_equal"]),
            _share(row["whole_equal_bf16"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def measure(kinds: Sequence[str], model: str, requests: int, watch: Any) -> dict[str, Any]:
    """Run each kind in all arms, and return its figures."""
    from dejakv.experiments.run import run as run_comparison
    from dejakv.experiments.settings import settings_from

    figures: dict[str, Any] = {}
    for kind in kinds:
        changed: dict[str, Any] = {
            "model": model,
            "dataset": KINDS[kind],
            "max_samples": requests,
            "rounding": requests,
            "promote": True,
        }
        settings = settings_from(PRESET, changed, {})
        if kind != PRESET:
            # These choose themselves what of a history a prompt has.
            settings = replace(settings, window=None)
        figures[kind] = figures_of(run_comparison(settings, watch).summary)
    return figures


def agents(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK} requests of each kind: some minutes.")
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(KINDS)}; repeatable (default: all)."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2-135m",
    requests: Annotated[
        int | None, typer.Option(min=2, help=f"Requests of each kind (default: {REQUESTS}).")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure agents' sessions beside prefix caching, with the answers that stay equal."""
    import torch
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.errors import ConfigError
    from dejakv.experiments.output import make_folder, replace_file
    from research.machine import measured

    if unknown := [name for name in kind or () if name not in KINDS]:
        raise ConfigError(f"--kind {unknown[0]!r} is unknown: choose from {', '.join(KINDS)}")
    torch.set_num_threads(threads)
    make_folder(output.parent)
    with watching(Console(stderr=True)) as watch:
        kinds = measure(
            kind or list(KINDS), model, requests or (QUICK if quick else REQUESTS), watch
        )
    result = {**measured("research.agents"), "model": model, "kinds": kinds}
    replace_file(output, json.dumps(result, indent=1) + "\n", "--output")
    typer.echo(table(kinds))


if __name__ == "__main__":
    run(agents)
