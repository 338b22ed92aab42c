"""`dejakv report`: one page from the files of runs, sweeps and estimates."""

from pathlib import Path
from typing import Annotated, Any

import typer

Sources = Annotated[
    list[Path], typer.Argument(help="Folders of runs or estimates, and logs of sweeps (.csv or .json).")
]
Output = Annotated[Path, typer.Option(help="The page to write; an earlier report is replaced, another file is not.")]
Svg = Annotated[Path | None, typer.Option(help="Folder for each chart as an SVG file of its own.")]


def report_command(sources: Sources, output: Output = Path("report.html"), svg: Svg = None) -> None:
    """Write one self-contained HTML page: tables, charts, changed answers and the commands that made them."""
    write_report(sources, output, svg)


def write_report(sources: list[Path], output: Path, svg: Path | None, files: Any = None) -> None:
    """Writes the page and says so. `files`: files that are sections, as `make_report` takes them."""
    from dejakv.experiments.report.make import FILES, make_report

    written = make_report(sources, output, svg, files or FILES)
    more = f" and {len(written) - 1} charts in {svg}" if svg is not None else ""
    typer.echo(f"written to {output}{more}")
