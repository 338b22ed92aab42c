"""`dejakv report`: one page from the files of runs, sweeps and estimates."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.cli.options import echo


def report_command(
    sources: Annotated[
        list[Path], typer.Argument(help="Folders of runs or estimates, and logs of sweeps (.csv).")
    ],
    output: Annotated[
        Path, typer.Option(help="Page to write; replaces an earlier report, but no other file.")
    ] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: tables, changed answers and the commands that made
    them.
    """
    from dejakv.experiments.reports.report import make_report

    make_report(sources, output)
    echo(f"written to {output}")
