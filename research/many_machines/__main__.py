"""The command: every part, or those that are named."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.errors import ConfigError
from dejakv.experiments.output import make_folder, read_json_or_empty, replace_file
from research.command import run
from research.machine import measured
from research.many_machines.services import Services, services
from research.workloads.streams import stream_of

Part = Callable[[Services, Path, bool, int | None], dict[str, Any]]


def hits(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.hits import hit_rates

    streams = [
        stream_of(name, "transformers", many or (4 if quick else 30))
        for name in ("rag", "sessions")
    ]
    return hit_rates(
        running, [replace(one, lengths=(300, 1_100)) for one in streams] if quick else streams
    )


def found(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.places import found

    return found(running, many or (20 if quick else 100), 6 if quick else 40)


def loads(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.places import loads

    return loads(running, folder / "prefix", many or (20 if quick else 100))


def chaos(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.chaos import chaos

    return chaos(running, many or (30 if quick else 600), 16 if quick else 80)


def orderings(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.hits import MODEL
    from research.many_machines.orderings import PASSAGES, gain, passages_of

    return gain(
        running, many or (8 if quick else 500), MODEL, passages_of(4 if quick else PASSAGES)
    )


def evictions(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    """As `orderings`, of short passages: so many of them that the budget is full."""
    from research.many_machines.hits import MODEL
    from research.many_machines.orderings import gain, passages_of

    return gain(
        running,
        many or (24 if quick else 500),
        "docs-lm" if quick else MODEL,
        passages_of(4 if quick else 6, 200),
    )


def simulation(running: Services, folder: Path, quick: bool, many: int | None) -> dict[str, Any]:
    from research.many_machines.simulation import simulated

    largest = many or (10_000 if quick else 1_000_000)
    sizes = [size for size in (1_000, 10_000, 100_000) if size < largest]
    return simulated(running, folder, [*sizes, largest], 20_000 if quick else 1_500_000)


PARTS: dict[str, Part] = {
    one.__name__: one for one in (loads, found, hits, chaos, orderings, evictions, simulation)
}


def many_machines(
    output: Annotated[Path, typer.Option(help="JSON file; finished parts in it are kept.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few requests: every part in under 5 minutes.")
    ] = False,
    many: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Of one part: requests of a workload, loads, orderings, seconds of chaos, segments"
                " of the largest catalog."
            ),
        ),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; repeatable (default: all).")
    ] = None,
) -> None:
    """Measure one cache of several machines."""
    import torch

    for name in part or ():
        if name not in PARTS:
            raise ConfigError(f"--part {name!r} is unknown: choose from {', '.join(PARTS)}")
    if many is not None and len(part or ()) != 1:
        raise ConfigError("--many is of one part: give one --part")
    torch.set_num_threads(1)
    make_folder(output.parent)
    result = read_json_or_empty(output) or {}
    if result and result.get("quick") != quick:
        raise ConfigError(
            f"{output} is of a run {'without' if quick else 'with'} --quick: give another --output"
        )
    result["quick"] = quick
    for name in part or PARTS:
        if name in result.get("parts", {}) and not part:
            continue
        with tempfile.TemporaryDirectory() as temporary, services(Path(temporary)) as running:
            typer.echo(f"{name} ...", err=True)
            made = PARTS[name](running, Path(temporary), quick, many)
        result.setdefault("parts", {})[name] = {
            **made,
            "measured": measured("research.many_machines"),
        }
        result |= {key: made[key] for key in KEYS if key in made}
        replace_file(output, json.dumps(result, indent=1) + "\n", "--output")
    for key in KEYS:
        typer.echo(f"{key} {result.get(key)}")
    typer.echo(f"written to {output}")


KEYS = (
    "hit_rate_one",
    "hit_rate_two",
    "found_ms",
    "s3_by_get",
    "wrong",
    "unanswered",
    "recovered_s",
)


if __name__ == "__main__":
    run(many_machines)
