"""What was found and not used is in the table of a run, with who refused it and why."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv.experiments.table import show, unused_table


def printed(what: Any) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(what)
    return " ".join(console.export_text().split())


def test_reasons_are_grouped_by_who_refused() -> None:
    table = unused_table({"lexical: content words: a against b": 3, "lexical: numbers: 1 against 2": 2, "odd": 9})
    text = printed(table)
    assert "lexical │ 5 │ content words: a against b (and 1 other reasons)" in text
    assert text.index("odd") < text.index("lexical")
    assert unused_table({}) is None


def test_a_run_with_exact_reuse_names_the_flag_that_would_use_what_was_found(tmp_path: Path) -> None:
    questions = ["Where does Ann live?", "where does ann  LIVE", "Where does Ann live?"]
    lines = [f'{{"question": "{question}", "context": "Ann lives in Paris."}}' for question in questions]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    given = {"model": "docs-lm", "dataset": "jsonl", "dataset_path": str(tmp_path / "q.jsonl"), "max_new_tokens": 2}
    template = {"prompt_template": "<s> {context} <q> {question} <a>"}
    summary = run(settings_from(None, {**given, **template, "arms": ("none", "cache")}, {})).summary
    console = Console(width=200, record=True, file=io.StringIO())
    show(summary, console=console)
    text = console.export_text()
    assert "found and not used" in text
    assert "--reuse adopt would use it" in " ".join(text.split())
