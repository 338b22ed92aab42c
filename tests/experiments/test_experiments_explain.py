"""The two forms in which a blend is explained: legible without colours, and complete as a page."""

import io
import random
from typing import Any

import pytest
from rich.console import Console

from dejakv.blend.settings import BlendConfig, quality_of
from dejakv.experiments.reports.explain import MARKS, explain, to_html, to_terminal
from dejakv_models.docs import ask, make_document, prompt_of

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
    for words in ("Settings", "selector", ">docs-lm</td>", ">computed</th>"):
        assert words in page


def test_a_token_that_was_chosen_is_not_told_as_changed(docs_engine: Any) -> None:
    explained = explain(docs_engine, DONOR, TARGET, BlendConfig(share=0.9, max_share=1.0))
    chosen = [token for token in explained.tokens if token.computed and not token.forced]
    assert chosen
    text = printed(explained)
    assert all(f"+{token.text.strip()}" in text.replace("+ ", "+") for token in chosen)


def test_every_token_is_either_taken_or_computed(explained: Any) -> None:
    taken = sum(not token.computed for token in explained.tokens)
    assert explained.summary.startswith(f"{taken} of {len(explained.tokens)} tokens took the donor's state")
    assert 1 - taken / len(explained.tokens) == pytest.approx(explained.report.share)


def test_strict_computes_more_unless_new_text_takes_its_share(docs_engine: Any) -> None:
    """As the README says: the shares count what is new, and beyond them all qualities compute the same rows."""
    rng = random.Random(5)
    old, new = (make_document(rng, facts=12).text for _ in range(2))
    asked = ask(make_document(rng, facts=5).facts[0], rng)
    donor = prompt_of(old, asked)

    def shares(target: str) -> list[float]:
        named = [quality_of(name) for name in ("strict", "default", "loose")]
        ways = [BlendConfig(selector=one.selector, share=one.share) for one in named]
        return [round(explain(docs_engine, donor, target, way).report.share, 2) for way in ways]

    strict, default, loose = shares(prompt_of(f"Ann lives in Rome. {old}", asked))
    assert strict == pytest.approx(0.4, abs=0.02)
    assert strict > default >= loose
    strict, default, loose = shares(prompt_of(f"{old} {new}", asked))
    assert strict == default == loose > 0.4
