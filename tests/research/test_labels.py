"""Labelled hits of the bundled documents model, as `python -m research.bound` reads them."""

from dataclasses import replace
from typing import Any

import pytest
from research.bound import table_of
from research.labels import labelled
from research.workloads.streams import Stream, chosen_of

from dejakv.experiments.settings import settings_from
from dejakv.request import Sampling


@pytest.fixture(scope="module")
def found(docs_engine: Any) -> list[dict[str, Any] | None]:
    stream = Stream(settings_from("docs", {"dtype": "fp32", "max_samples": 60}, {}), 12, (150, 4_000))
    chosen, prompter, _ = chosen_of(stream)
    asked = [replace(prompter.request(sample), sampling=Sampling(3)) for sample in chosen]
    lines = list(
        labelled(docs_engine, replace(stream.settings.cache, min_gain_share=0.0), asked, ["strict"], rounded=2)
    )
    assert [number for number, _ in lines] == list(range(12))
    return [line for _, line in lines]


def test_what_stands_in_no_prompt_before_is_no_hit(found: list[dict[str, Any] | None]) -> None:
    assert found[0] is None
    assert any(found)


def test_each_hit_tells_what_a_blend_changed(found: list[dict[str, Any] | None]) -> None:
    hits = [hit for hit in found if hit]
    for hit in hits:
        assert 0 < hit["computed_tokens"] < hit["prompt_tokens"]
        assert hit["wrong"]["answer"] or not hit["wrong"]["first"]
        assert hit["kl"] >= 0
        assert hit["margin"] >= 0
        assert hit["strict"]["computed_tokens"] >= hit["computed_tokens"]
    assert ["bf16" in hit for hit in hits] == [place < 2 for place in range(len(hits))]


def test_the_bound_reads_the_lines(found: list[dict[str, Any] | None]) -> None:
    hits = [hit for hit in found if hit]
    for ordered in ("plan", "margin"):
        table = table_of(hits, "first", ordered)
        assert table.wrong.tolist() == [hit["wrong"]["first"] for hit in hits]
        assert ((table.risks >= 0) & (table.risks <= 1)).all()
