"""`python -m research.frontier.trials`: ways to keep more answers, each beside today's default.

    OMP_NUM_THREADS=1 python -m research.frontier.trials corrections selection order repair
    --output FILE.json

All ways of a trial blend the same cases in one run; a stopped run goes on from its file.

corrections  stored state of passages plus what a settled prompt showed: low-rank differences and
             means
selection    the question's attention in a single layer, and by anchors of passages
order        passages sorted by how much the question attends to them
repair       when a blended answer first leaves the full computation's, in 64 tokens
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from research.command import run

TRIALS = ("corrections", "selection", "order", "repair")
KINDS = ("apart", "two-hop")

Line = dict[str, Any]


def summary_of(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Return the figures by kind and way: means, and counts of answers that stayed equal."""
    from research.frontier.report import mean_of

    figures: dict[str, dict[str, Line]] = {}
    for kind in dict.fromkeys(line["kind"] for line in lines):
        of_kind = [line["rows"] for line in lines if line["kind"] == kind]
        ways: dict[str, list[Line]] = {}
        for rows in of_kind:
            for way, row in rows.items():
                ways.setdefault(way, []).append(row)
        figures[kind] = {
            way: {
                "cases": len(rows),
                "kl": mean_of(rows, "kl_mean"),
                "first_equal": sum(not row["changed"] for row in rows),
                "whole_equal": sum(row["top1"] == 1.0 for row in rows),
                "right": sum(bool(row["right"]) for row in rows),
                "asked": sum(row["right"] is not None for row in rows),
                "share": mean_of(rows, "share")[0],
                **({"stays": [row["stays"] for row in rows]} if "stays" in rows[0] else {}),
            }
            for way, rows in ways.items()
        }
    return figures


def table(figures: dict[str, dict[str, Line]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| kind | way | computed | KL (95%) | first equal | whole equal | right |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind, ways in figures.items():
        for way, row in ways.items():
            mean, low, high = row["kl"]
            lines.append(
                f"| {kind} | {way} | {row['share']:.0%} | {mean:.4f} ({low:.4f} to {high:.4f}) |"
                f" {row['first_equal']} of {row['cases']} | {row['whole_equal']} |"
                f" {row['right']} of {row['asked']} |"
            )
    return "\n".join(lines)


def trials(
    trial: Annotated[list[str], typer.Argument(help=f"Of {', '.join(TRIALS)}.")],
    output: Annotated[Path, typer.Option(help="JSON file; a stopped run in it is continued.")],
    cases: Annotated[int, typer.Option(min=1, help="Cases of each kind.")] = 20,
    rounding: Annotated[int, typer.Option(min=0, help="Of them computed in bf16, too.")] = 20,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(KINDS)}; repeatable (default: all)."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure the ways of some trials on the same cases."""
    import torch

    from dejakv.errors import ConfigError
    from dejakv.experiments.output import make_folder, read_json_or_empty, replace_file
    from research.machine import measured

    for names, choices in ((trial, TRIALS), (kind or (), KINDS)):
        if unknown := [name for name in names if name not in choices]:
            raise ConfigError(f"{unknown[0]!r} is unknown: choose from {', '.join(choices)}")
    torch.set_num_threads(threads)
    make_folder(output.parent)
    settings = {"trials": trial, "model": Path(model).name, "seed": seed}
    earlier = read_json_or_empty(output)
    if earlier and earlier.get("settings") != settings:
        raise ConfigError(f"{output} has cases of other trials: give another --output")
    lines: list[Line] = earlier.get("lines", [])
    done = {(line["kind"], line["number"]) for line in lines}
    wanted = [(name, number) for number in range(cases) for name in kind or KINDS]
    for line in _measured(trial, settings, rounding, [one for one in wanted if one not in done]):
        lines.append(line)
        result = {
            **measured("research.frontier.trials"),
            "settings": settings,
            "figures": summary_of(lines),
            "lines": lines,
        }
        replace_file(output, json.dumps(result) + "\n", "--output")
        typer.echo(f"{line['kind']} {line['number']}: {line['tokens']} tokens", err=True)
    typer.echo(table(summary_of(lines)))


def _measured(
    trials: Sequence[str],
    settings: dict[str, Any],
    rounding: int,
    wanted: Sequence[tuple[str, int]],
) -> Iterator[Line]:
    from dejakv.engines.transformers.engine import TransformersEngine
    from research.frontier import tried
    from research.frontier.run import twin_of

    engine = TransformersEngine.from_pretrained(settings["model"], dtype="fp32")
    bench = tried.TrialBench(engine, twin=twin_of(engine))
    for kind, number in wanted:
        yield tried.measure(
            bench, kind, number, settings["seed"], trials, rounding=number < rounding
        )


if __name__ == "__main__":
    run(trials)
