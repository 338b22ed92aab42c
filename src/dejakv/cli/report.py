"""`dejakv report`: one page from the files of runs, sweeps and estimates."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    sources: Annotated[
        list[Path], typer.Argument(help="Folders of runs or estimates, and logs of sweeps (.csv or .json).")
    ],
    output: Annotated[Path, typer.Option(help="Page to write; replaces an earlier report, but no other file.")] = Path(
        "report.html"
    ),
    svg: Annotated[Path | None, typer.Option(help="Folder for each chart as an SVG file of its own.")] = None,
) -> None:
    """Write one self-contained HTML page: tables, charts, changed answers and the commands that made them."""
    from dejakv.experiments.report.make import make_report

    written = make_report(sources, output, svg)
    more = f" and {len(written) - 1} charts in {svg}" if svg is not None else ""
    typer.echo(f"written to {output}{more}")
