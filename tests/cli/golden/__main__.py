"""Writes the golden help texts anew: `python -m tests.cli.golden`."""

from tests.cli.test_cli_help import GOLDEN, PAGES, plain

for page in PAGES:
    (GOLDEN / f"help-{'-'.join(page)}.txt").write_text(plain(*page))
