"""Why a sample hit or missed, from the folder of its run: the same decision as the run's, and every candidate behind it."""

import io
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.documents import COSTS as ASKED

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError
from dejakv.experiments.reports.why import decision_sentences, explain_sample, to_html, to_terminal
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from
from dejakv_models.docs import ask, make_document

COSTS = {"costs": (1e-4, 0.0, 0.0, 0.0)}
"""Fixed, or other measurements may lead to another decision."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    run(settings_from("shapes", {"max_samples": 14, "arms": ("none", "cache"), "output": str(output)}, COSTS))
    return output


def test_it_decides_as_the_run_did(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    methods = {line["arms"]["cache"]["method"] for line in lines}
    assert len(methods) > 1
    for line in lines[::2]:
        record = line["arms"]["cache"]
        found = explain_sample(folder, line["id"])
        assert found.method == record["method"], line["id"]
        assert (found.computed, found.decision.tokens) == (record["computed_tokens"], record["prompt_tokens"])
        if record["method"] != "none":
            assert found.donors[0] in {earlier["id"] for earlier in lines[: found.earlier]}
        assert record["provenance"] in found.recorded


def test_what_it_tells_of_a_hit(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    hit = next(line for line in lines if line["arms"]["cache"]["method"] in ("exact", "adopt"))
    found = explain_sample(folder, hit["id"])
    assert any(one.trusted for one in found.candidates)
    assert any(not one.trusted for line in lines[8:] for one in explain_sample(folder, line["id"]).candidates)
    assert all(one.verdicts for one in found.candidates)
    assert found.computed == 1
    buffer = io.StringIO()
    to_terminal(found, Console(file=buffer, width=200))
    page = to_html(found)
    for words in ("threshold", "considered: full", "exact prefix:", found.candidates[0].sample):
        assert words in buffer.getvalue()
        assert words in page
    assert "dejakv run --model shapes-vlm" in page
    assert "default-src 'none'" in page


def test_an_unknown_sample_and_a_folder_without_a_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no sample 'shapes-0-q00000' .did you mean shapes-0-q0000"):
        explain_sample(folder, "shapes-0-q00000")
    with pytest.raises(ConfigError, match=r"no summary\.json of a run"):
        explain_sample(tmp_path, "1")
    with pytest.raises(ConfigError, match="no folder"):
        explain_sample(tmp_path / "missing", "1")


def chain(**_options: object) -> list[Sample]:
    """A data set: prompts of two documents, of which the first was the second of the prompt before. From the third one on it is in
    the rows that the blend before kept, and nowhere else."""
    rng = random.Random(11)
    texts = [make_document(rng, facts=12) for _ in range(7)]
    return [
        Sample(f"chain-{number}", ask(other.facts[0], random.Random(number)), context=f"{one.text} {other.text}")
        for number, (one, other) in enumerate(pairwise(texts))
    ]


@pytest.fixture(scope="module")
def blended(docs_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose blends take rows that blends kept."""
    output = tmp_path_factory.mktemp("blended")
    chosen = {"dataset": f"{__name__}:chain", "max_new_tokens": 2}
    cache = {"reuse": "blend", "costs": ASKED, "semantic_text": False}
    run(settings_from("docs", {**chosen, "output": str(output)}, cache), engine=docs_engine)
    return output


def test_it_blends_as_the_run_did_with_the_rows_that_blends_kept(blended: Path) -> None:
    lines = [json.loads(line) for line in (blended / "samples.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines[1:]):
        ran, found = line["arms"]["cache"], explain_sample(blended, line["id"])
        assert (ran["method"], set(ran["donors"])) == ("blend", {f"chain-{number}"})
        assert (found.method, found.computed) == ("blend", ran["computed_tokens"])
        assert list(found.donors) == ran["donors"]


def test_where_the_run_decided_otherwise_both_are_told(blended: Path, tmp_path: Path) -> None:
    """As where two plans take nearly the same time, and other times were measured then."""
    lines = [json.loads(line) for line in (blended / "samples.jsonl").read_text().splitlines()]
    lines[-1]["arms"]["cache"] |= {"computed_tokens": 77, "donors": []}
    for name in ("settings.json", "summary.json"):
        (tmp_path / name).write_text((blended / name).read_text())
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = decision_sentences(explain_sample(tmp_path, lines[-1]["id"]))
    assert said[0].startswith("plan: blend, ")
    assert re.match(r"the run noted: .*, 77 of \d+ tokens computed", said[-1])
