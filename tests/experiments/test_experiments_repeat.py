"""A stream that comes twice: without idle time its second round is approximate again, with it exact."""

from typing import Any

from dejakv.datasets.base import Sample
from dejakv.experiments.run import run
from dejakv.experiments.samples import repeated
from dejakv.experiments.settings import settings_from

SAMPLES = 8


def methods(engine: Any, promote: bool) -> tuple[list[str], list[str]]:
    """Of both rounds."""
    chosen = {"max_samples": SAMPLES, "repeat": 2, "promote": promote, "arms": ("cache",), "dtype": "fp32"}
    costs = {
        "min_gain_share": 0.0,
        "costs": (1e-4, 0.0, 0.0, 0.0),
    }  # fixed: what is measured on a busy machine may speak for another plan
    rows = run(settings_from("docs", chosen, costs), engine=engine).rows
    found = [row.arms["cache"].record.method for row in rows]
    assert len(found) == 2 * SAMPLES
    return list(found[:SAMPLES]), list(found[SAMPLES:])


def test_idle_time_makes_the_second_round_exact(docs_engine: Any) -> None:
    first, second = methods(docs_engine, promote=True)
    assert "blend" in first
    assert set(second) == {"exact"}
    first, second = methods(docs_engine, promote=False)
    assert [method for method in second if method != "exact"] == ["blend"] * first.count("blend")


def test_every_round_has_ids_of_its_own() -> None:
    samples = (Sample("a", "?", None), Sample("b", "?", None))
    assert [sample.id for sample in repeated(samples, 2)] == ["a", "b", "a#2", "b#2"]
    assert repeated(samples, 1) == samples
