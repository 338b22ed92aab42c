"""Texts of other people cannot control the operator's terminal."""

from io import StringIO

import pytest
from rich.console import Console

from dejakv.experiments.reports.report import text
from dejakv.experiments.table import TextTable, print_blocks

HARMFUL = ["\x1b[2J", "\x9b31m", "\x07", "\r", "\x00", "\u202e", "\u2066", "\u200f", "\x7f"]


@pytest.mark.parametrize("control", HARMFUL)
def test_controls_are_escaped_in_tables_sentences_and_reports(control: str) -> None:
    said = f"a{control}b"
    file = StringIO()
    print_blocks([TextTable(said, ("", said), [(said, said)]), said], Console(file=file, width=200))
    for shown in (file.getvalue(), text(said)):
        assert control[0] not in shown
        assert ascii(control[0])[1:-1] in shown
