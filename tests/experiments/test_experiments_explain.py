"""The two forms in which a blend is explained: legible without colours, and complete as a page."""

import io
from typing import Any

import pytest
from rich.console import Console

from dejakv.experiments.explain import MARKS, explain, to_html, to_terminal

DONOR = "<s> Ann lives in Paris. Bob lives in Rome. Dan lives in Oslo. <q> Where does Bob live? <a>"
TARGET = "<s> Ann lives in Paris. Bob lives in Lima. Dan lives in Oslo. <q> Where does Bob live? <a>"


@pytest.fixture(scope="module")
def explained(docs_engine: Any) -> Any:
    return explain(docs_engine, DONOR, TARGET)


def printed(explained: Any, **more: Any) -> str:
    buffer = io.StringIO()
    to_terminal(explained, Console(file=buffer, width=250, **more))
    return buffer.getvalue()


def test_piped_it_has_marks_and_speaks_of_no_colours(explained: Any) -> None:
    text = printed(explained)
    assert "!lima" in text.lower()
    assert "!: changed" in text
    for _, style, _ in MARKS.values():
        assert style not in text


def test_on_a_terminal_it_has_colours(explained: Any) -> None:
    text = printed(explained, force_terminal=True, color_system="truecolor")
    assert "!lima" not in text.lower()
    assert "bold white on red" in text


def test_the_page_has_the_donor_the_map_the_model_and_the_settings(explained: Any) -> None:
    page = to_html(explained, "docs-lm")
    assert "Dan lives in Oslo. &lt;q&gt;" in page
    assert page.count("<tr>") > len(explained.tokens)
    for words in ("Settings", "selector", "<td>docs-lm</td>", "layers that computed it"):
        assert words in page


def test_tokens_and_rows_do_not_contradict_each_other(explained: Any) -> None:
    assert "a token has a row in each layer" in explained.summary
