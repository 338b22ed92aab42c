"""The command: blocks of phases in turn, each kept as it ends; then the figures and the page."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.errors import ConfigError
from dejakv.experiments.output import read_object, replace_file
from research.command import run
from research.load import page
from research.load.figures import ALL_AT_ONCE, ARMS, BASE, Row, capacity, figures
from research.load.stream import WORKLOADS
from research.machine import measured

PARTS = ("load", "exact", "misses")
TRIAL_RATE = 0.6
"""Requests a second of SmolLM2 on one thread, for the first estimate."""
QUICK = {"workloads": ("rag",), "loads": (80,), "requests": 6, "warm": 8, "rounds": 1, "turns": 2}


def measure_load(
    output: Annotated[Path | None, typer.Option(help="JSON of the figures; what is measured goes to .rows.jsonl beside it.")] = None,
    report: Annotated[Path | None, typer.Option(help="Measure nothing: write the page of this JSON beside it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One workload, one load, few requests, no other part.")] = False,
    parts: Annotated[str, typer.Option(help="Of load, exact and misses.")] = ",".join(PARTS),
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKLOADS),
    loads: Annotated[str, typer.Option(help="Percent of prefix caching's capacity.")] = "50,80,95",
    requests: Annotated[int, typer.Option(min=1, help="Of a phase; mix has as many again that share nothing.")] = 20,
    warm: Annotated[int, typer.Option(min=1, help="Prompts that are served before.")] = 24,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Of exact and misses.")] = 8,
    model: Annotated[str, typer.Option(help="A name of dejakv models.")] = "smollm2-135m",
    threads: Annotated[int, typer.Option(min=1, help="OMP_NUM_THREADS of each server.")] = 1,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV cache of each server, GiB.")] = 4,
) -> None:  # fmt: skip
    """Measure vLLM under load, with and without the connector."""
    if report is not None:
        _write_page(report, read_object(report))
        return
    if output is None:
        raise ConfigError("nothing to do: give --output FILE.json, or --report FILE.json of an earlier run")
    from research.load.phases import Settings

    sizes = {
        "workloads": _listed(workloads, "workloads", WORKLOADS), "loads": tuple(map(int, loads.split(","))),
        "requests": requests, "warm": warm, "rounds": rounds, "turns": turns,
    }  # fmt: skip
    settings = Settings(model=model, threads=threads, kv_gib=kv_gib, **(QUICK if quick else sizes))
    chosen = PARTS[:1] if quick else _listed(parts, "parts", PARTS)
    kept = Kept(output.with_suffix(".rows.jsonl"), {"arms": ARMS, **asdict(settings)})
    _measure(settings, chosen, kept)
    rows = [row for some in kept.blocks.values() for row in some]
    result = {**measured("research.load"), "settings": asdict(settings), **figures(rows)}
    replace_file(output, json.dumps(result, indent=1) + "\n", "--output")
    _write_page(output, result)


def _listed(given: str, option: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(given.split(","))
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"--{option} {','.join(wrong)}: choose of {','.join(known)}")
    return names


class Kept:
    """The rows of finished blocks in a file, a block a line behind the settings. A line that was cut off is measured again."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises: ConfigError for rows of other settings."""
        told = json.loads(json.dumps({"settings": settings}))
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) != told:
            raise ConfigError(f"{path} has rows of other settings: give them again, or another --output")
        self.path = path
        self.blocks: dict[str, list[Row]] = {}
        for line in lines[1:]:
            try:
                self.blocks |= json.loads(line)
            except ValueError:
                break
        path.write_text("".join(json.dumps(line) + "\n" for line in (told, *({n: b} for n, b in self.blocks.items()))))

    def add(self, name: str, rows: list[Row]) -> None:
        self.blocks[name] = rows
        with self.path.open("a") as file:
            file.write(json.dumps({name: rows}) + "\n")

    def rate(self, workload: str) -> float | None:
        """Prefix caching's capacity in the first round that was measured."""
        of = [row for row in self.blocks.get(f"{workload}/0", ()) if (row["load"], row["arm"]) == (ALL_AT_ONCE, BASE)]
        return capacity(of[0]) if of else None


def _measure(settings: Any, parts: Sequence[str], kept: Kept) -> None:
    from research.load.phases import MISSES, exact_hits, loaded, misses

    blocks: dict[str, dict[str, Callable[..., Iterator[Row]]]] = {settings.model: {}}
    own = blocks[settings.model]
    if "load" in parts:
        for number in range(settings.rounds):
            for name in settings.workloads:
                own[f"{name}/{number}"] = partial(loaded, settings=settings, workload=name, number=number)
    if "exact" in parts:
        own["exact"] = partial(exact_hits, settings=settings)
    for model in MISSES if "misses" in parts else ():
        blocks.setdefault(model, {})[f"misses/{model}"] = partial(misses, settings=settings, model=model)
    for model, wanted in blocks.items():
        left = {name: block for name, block in wanted.items() if name not in kept.blocks}
        if not left:
            continue
        with servers_of(model, settings, ARMS if model == settings.model else ARMS[:2]) as servers:
            for name, block in left.items():
                workload = name.split("/")[0]
                more = {"rate": kept.rate(workload)} if workload in WORKLOADS else {}
                rest = [other for other in left if other not in kept.blocks and other.split("/")[0] in WORKLOADS]
                left_s = sum(settings.seconds(other.split("/")[0], more.get("rate") or TRIAL_RATE) for other in rest)
                began = time.monotonic()
                typer.echo(f"{name} begins; about {left_s / 60:.0f} minutes of load are left", err=True)
                kept.add(name, list(block(servers, **more)))
                typer.echo(f"{name}: {time.monotonic() - began:.0f} s", err=True)


@contextmanager
def servers_of(model: str, settings: Any, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Running servers by arm, with stores that are removed at the end."""
    from research.load.server import VLLMServer

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        servers = {
            arm: stack.enter_context(VLLMServer(model, arm, Path(folder), settings.threads, settings.kv_gib))
            for arm in arms
        }
        for server in servers.values():
            server.wait()
        yield servers


def _write_page(file: Path, result: dict[str, Any]) -> None:
    if "settings" not in result:
        raise ConfigError(f"{file} has no figures of research.load: give the file of an --output")
    replace_file(file.with_suffix(".md"), page.text(result, file.name), "--output")
    print(f"written: {file.with_suffix('.md')}", file=sys.stderr)


if __name__ == "__main__":
    run(measure_load)
