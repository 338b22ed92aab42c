"""The command: rounds of workloads, each kept as it ends; then the figures and the page."""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.output import read_json_or_empty, replace_file
from research.command import run
from research.load import page
from research.load.figures import ALL_AT_ONCE, ARMS, Row, errors_of, figures
from research.load.stream import WORKLOADS
from research.machine import measured, versions

QUICK = {"workloads": ("rag",), "loads": (80,), "requests": 6, "warm": 8, "rounds": 1}


def measure_load(
    output: Annotated[
        Path | None,
        typer.Option(help="JSON of the figures; what is measured goes to .rows.jsonl beside it."),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: write the page of this JSON beside it; repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One workload, one load, few requests.")
    ] = False,
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKLOADS),
    loads: Annotated[str, typer.Option(help="Percent of what prefix caching takes.")] = "50,80,95",
    requests: Annotated[
        int, typer.Option(min=2, help="Of a phase; half of them share nothing in mix.")
    ] = 8,
    warm: Annotated[int, typer.Option(min=1, help="Prompts that are served before.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV cache of each server, GiB.")] = 2,
) -> None:
    """Measure vLLM under load, with and without the connector."""
    if report:
        _write_page(*((file, read_json_or_empty(file)) for file in report))
        return
    if output is None or output.suffix != ".json":
        raise ConfigError(
            "nothing to do: give --output FILE.json, or --report FILE.json of an earlier run"
        )
    from research.load.phases import Settings
    from research.load.server import FLAGS

    if wrong := [name for name in workloads.split(",") if name not in WORKLOADS]:
        raise ConfigError(f"--workloads {','.join(wrong)}: choose of {','.join(WORKLOADS)}")
    if wrong := [load for load in loads.split(",") if not load.isdecimal() or int(load) == 0]:
        raise ConfigError(f"--loads {','.join(wrong)}: give percentages, such as 50,80,95")
    sizes = {
        "workloads": tuple(workloads.split(",")), "loads": tuple(map(int, loads.split(","))),
        "requests": requests, "warm": warm, "rounds": rounds,
    }  # fmt: skip
    settings = Settings(kv_gib=kv_gib, **(QUICK if quick else sizes))
    told = {"flags": FLAGS, **asdict(settings)}
    del told["workloads"], told["rounds"]  # more of them may be asked of a run that goes on
    kept = Kept(output.with_suffix(".rows.jsonl"), {**told, "versions": versions()})
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an exception, as Ctrl-C: servers are stopped
    for _ in _measured(settings, kept):
        result = {**measured("research.load"), "settings": told, "workloads": figures(kept.rows)}
        replace_file(output, json.dumps(result, indent=1) + "\n", "--output")
        _write_page((output, result))
    if errors := errors_of(kept.rows):
        raise DejaKVError(
            f"{len(errors)} requests failed, and {output} has no figures of their arms; one says:"
            f" {errors[0]}"
        )


class Kept:
    """The rows of finished rounds in a file, a round a line behind the settings.

    A line that was cut off is measured again.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises: ConfigError for rows of other settings."""
        told = json.loads(json.dumps({"settings": settings}))
        found: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        if found and found[0] != told:
            raise ConfigError(
                f"{path} has rows of other settings or versions: remove it, or give another"
                " --output"
            )
        self.path = path
        self.blocks: dict[str, list[Row]] = {
            name: rows for line in found[1:] for name, rows in line.items()
        }
        lines = [told, *({name: rows} for name, rows in self.blocks.items())]
        replace_file(path, "".join(json.dumps(line) + "\n" for line in lines), "--output")

    def add(self, name: str, rows: list[Row]) -> None:
        self.blocks[name] = rows
        with self.path.open("a") as file:
            file.write(json.dumps({name: rows}) + "\n")

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.blocks.values() for row in rows]

    def rate(self, workload: str) -> float | None:
        """Requests a second of prefix caching for the prompts that were served before, in the
        first round.
        """
        of = [row for row in self.blocks.get(f"{workload}/0", ()) if row["load"] != ALL_AT_ONCE]
        return 100 * of[0]["rate"] / int(of[0]["load"]) if of else None


def _measured(settings: Any, kept: Kept) -> Iterator[None]:
    """Yields after each round of a workload that it added, and once if there is none to add."""
    from research.load.phases import loaded
    from research.load.server import VLLMServer

    every = [
        (workload, number) for number in range(settings.rounds) for workload in settings.workloads
    ]
    left = [
        (workload, number)
        for workload, number in every
        if f"{workload}/{number}" not in kept.blocks
    ]
    if not left:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        servers = {
            arm: stack.enter_context(VLLMServer(arm, Path(folder), settings.kv_gib)) for arm in ARMS
        }
        for server in servers.values():
            server.wait()
        for workload, number in left:
            rows, began = list[Row](), time.monotonic()
            for row in loaded(servers, settings, workload, number, kept.rate(workload)):
                rows.append(row)
                now = time.monotonic() - began
                typer.echo(
                    f"{now:5.0f} s: {workload}/{number}, load {row['load']}, {row['arm']}", err=True
                )
            kept.add(f"{workload}/{number}", rows)
            yield


def _write_page(*runs: tuple[Path, dict[str, Any]]) -> None:
    """Beside the first one's JSON."""
    for file, result in runs:
        if "workloads" not in result or file.suffix != ".json":
            raise ConfigError(
                f"{file} has no figures of research.load: give the JSON of an --output"
            )
    written = runs[0][0].with_suffix(".md")
    replace_file(written, page.text(*((result, file.name) for file, result in runs)), "--output")
    print(f"written: {written}", file=sys.stderr)


if __name__ == "__main__":
    run(measure_load)
