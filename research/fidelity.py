"""`python -m research.fidelity`: how near blended answers are to those of full computation.

Each kind of change has its own figures.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.blend.settings import DEFAULT
from research.command import run
from research.frontier.bench import NOISE

QUICK, SAMPLES = 4, 100
PASSAGES = 3
"""As in docs/results/frontier-smollm2.md."""


def fidelity(
    output: Annotated[
        Path,
        typer.Option(help="JSON file; its cases are kept beside it, and a stopped run goes on."),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK} cases of each kind: some minutes.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Model, as of research.frontier; answers are right or wrong with docs-lm alone."
        ),
    ] = "smollm2-135m",
    samples: Annotated[
        int | None, typer.Option(help=f"Cases of each kind (default: {SAMPLES}).")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of change; repeatable (default: all).")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="Way of blending to measure beside the default; repeatable."),
    ] = None,
    passages: Annotated[
        int, typer.Option(help="Passages in a prompt of a model of real text.")
    ] = PASSAGES,
    bf16: Annotated[
        bool, typer.Option(help="Full computation in the other dtype, too: half of the time.")
    ] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure KL divergence, likeliest tokens, share of recomputed tokens and time of blending."""
    import torch
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import make_folder, replace_file
    from research.frontier.run import run_frontier
    from research.machine import measured

    torch.set_num_threads(threads)
    make_folder(output.parent)
    with watching(Console(stderr=True), counts="cases") as watch:
        report = run_frontier(
            model, samples or (QUICK if quick else SAMPLES), output.with_suffix(""),
            kinds=kind or (),
            facts=None if Path(model).name == "docs-lm" else passages,
            only=(DEFAULT, *(way or ())), noise=bf16,
            watch=watch,
        )  # fmt: skip
    found = {**measured("research.fidelity"), **figures(report)}
    replace_file(output, json.dumps(found, indent=1) + "\n", "--output")
    for kind_, row in found["kinds"].items():
        typer.echo(f"{kind_:16} {told(row)}")
    for name, kinds in found["ways"].items():
        for kind_, row in kinds.items():
            more, low, high = row["kl_more"]
            typer.echo(
                f"{kind_:16} {told(row)}; {name}: KL {more:+.4f} ({low:+.4f} to {high:+.4f})"
            )
    typer.echo(f"written to {output}")


def told(row: Mapping[str, Any]) -> str:
    """One kind's figures in a line."""
    changed = "" if row["changed"] is None else f"first tokens changed {row['changed'][0]:.1%}, "
    return (
        f"KL {row['kl'][0]:.4f}, top-1 {row['top1'][0]:.3f}, {changed}{row['share']:.1%} of the"
        f" tokens, n {row['n']}"
    )


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """From the rows of a frontier to `kinds[kind]` of the default, and `ways[way][kind]` of the
    other ways.

    kl, top1      along full computation's answer; mean and 95% by bootstrap
    top1_bf16     `top1` of full computation in the other dtype, bf16; None where it was not
                  measured
    changed       share of answers with another first token; 95% (Wilson)
    share         of tokens that are recomputed
    time_by_full  over the time of full computation; median and quartiles
    kl_more, top1_more  of other ways: beyond the default's, case by case; mean and 95%
    """
    noise = {row["kind"]: row["top1"] for row in report["rows"] if row["selector"] == NOISE}
    made: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["map"]:
            made.setdefault(row["way"], {})[row["kind"]] = {
                "n": row["n"],
                "kl": row["kl_mean"],
                "top1": row["top1"],
                "top1_bf16": noise.get(row["kind"]),
                "changed": row["changed"],
                "share": row["mean_share"],
                "time_by_full": row["time_by_full"],
                "accuracy": row["accuracy"],
                "accuracy_by_full": row["of_full"],
                "kl_more": row["kl_more"],
                "top1_more": row["top1_more"],
            }
    settings = {name: value for name, value in report.items() if name != "rows"}
    return {**settings, "kinds": made.pop(DEFAULT), "ways": made}


if __name__ == "__main__":
    run(fidelity)
