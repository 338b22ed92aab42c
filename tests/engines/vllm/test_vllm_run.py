"""`dejakv run --engine vllm`, from the command line to the files, on the bundled models: adopt, exact and blend."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dejakv.blend.settings import QUALITIES, BlendConfig, BlendQuality
from dejakv.cli.main import typer_app
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.experiments.vllm_engine import connector_settings


@dataclass(frozen=True)
class Ran:
    """A run's two files and what it printed. `records(arm)` are the arm's records in the order of the samples."""

    folder: Path
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    printed: str

    def records(self, arm: str = "cache", method: str | None = None) -> list[dict[str, Any]]:
        every = [line["arms"][arm] for line in self.lines]
        return [record for record in every if method in (None, record["method"])]

    def computed(self, arm: str) -> int:
        return self.summary["arms"][arm]["computed_tokens"]

    def changed(self, arm: str, method: str | None = None) -> list[str]:
        """Samples whose answer is not the `none` arm's."""
        pairs = [(line["id"], line["arms"]["none"], line["arms"][arm]) for line in self.lines]
        return [id for id, none, other in pairs if method in (None, other["method"]) and other["text"] != none["text"]]


def _command(*flags: str) -> Any:
    return CliRunner().invoke(typer_app, ["run", "--engine", "vllm", *flags])


def _run(folder: Path, *flags: str) -> Ran:
    done = _command(*flags, "--output", str(folder))
    assert done.exception is None, done.exception
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return Ran(folder, json.loads((folder / "summary.json").read_text()), lines, done.output)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return _run(tmp_path_factory.mktemp("adopt"), "--preset", "shapes", "--max-samples", "16")


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Prompts of `docs`, and one of their documents behind a new sentence, twice, and with its halves exchanged."""
    folder = tmp_path_factory.mktemp("blend")
    samples = list(islice(open_dataset("docs", DatasetOptions()), 13))
    asked, document = samples[0].question, samples[0].context
    sentences = document.split(". ")
    half = len(sentences) // 2
    edited = f"The animal of Otto is a dog. {document}"
    exchanged = ". ".join([*sentences[half:], *sentences[:half]])
    pairs = [
        *((sample.context, sample.question) for sample in samples),
        *((each, asked) for each in (edited, edited, exchanged)),
    ]
    log = folder / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"context": context, "question": question}) + "\n" for context, question in pairs)
    )
    flags = ["--dataset", "log", "--dataset-path", str(log), "--cache-dir", str(folder / "kv")]
    flags += ["--set", "min_gain_share=0"]
    return _run(folder, "--preset", "docs", *flags)


def test_the_files_are_those_of_any_engine(shapes: Ran) -> None:
    assert shapes.summary["samples"] == len(shapes.lines) == shapes.summary["arms"]["none"]["encoder_runs"] == 16
    assert set(shapes.summary["arms"]) == {"none", "prefix", "cache"}
    wanted = {"hit_rate", "by_level", "by_method", "agreement", "beyond_prefix", "lookup_ms", "store_bytes"}
    assert wanted <= set(shapes.summary)
    assert {"exact_text", "semantic_text", "embedding:prompt", "kv_cache"} <= set(shapes.lines[0]["statuses"])
    assert "Answers as in full computation" in shapes.printed


def test_adopt_runs_the_donor_and_exact_stays_exact(shapes: Ran) -> None:
    adopted = shapes.records(method="adopt")
    assert adopted
    assert all(record["approximate"] and record["donor"] and not record["stored"] for record in adopted)
    assert shapes.records(method="exact")
    assert (
        shapes.changed("cache", "exact") == shapes.changed("cache", "prefix") == shapes.changed("cache", "none") == []
    )
    assert shapes.computed("cache") < shapes.computed("prefix") < shapes.computed("none")


def test_decisions_are_those_of_the_transformers_engine(shapes: Ran, tmp_path: Path) -> None:
    flags = ["run", "--preset", "shapes", "--max-samples", "16", "--arms", "none,cache", "--output", str(tmp_path)]
    flags += ["--costs", "1,0,0,0"]  # vLLM knows no costs: what saves most tokens runs
    assert CliRunner().invoke(typer_app, flags).exception is None
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    there = [line["arms"]["cache"] for line in lines]
    same = ("method", "level", "approximate", "text")
    # vLLM's own cache holds prefixes in whole blocks, which are longer than the pipeline's: here and there it has none.
    here = shapes.records()
    for mine, other in zip(here, there, strict=True):
        if {mine["method"], other["method"]} == {"none", "prefix"}:
            assert mine["text"] == other["text"]
        else:
            assert [mine[name] for name in same] == [other[name] for name in same]


def test_blend_is_blended_by_the_connector(blended: Ran) -> None:
    mixed = blended.records(method="blend")
    assert len(mixed) >= 3
    for record in mixed:
        assert 16 < record["computed_tokens"] < record["prompt_tokens"]
        assert record["bytes_loaded"] > 0
        assert record["inject_ms"] > 0
        assert (record["approximate"], record["stored"]) == (True, False)
    once = {record["key"] for record in mixed}
    assert len(once) < len(mixed), "it is blended again when it comes again"
    assert not [record for record in blended.records() if record["key"] in once and record["method"] != "blend"]
    assert {record["donor"] for record in mixed}.isdisjoint(once)
    assert blended.summary["by_method"]["blend"] == len(mixed)
    assert blended.computed("cache") < blended.computed("none")


def test_what_is_not_blended_says_why_and_is_exact(blended: Ran) -> None:
    refused = [record for record in blended.records() if "too little is alike" in record["reason"]]
    assert refused
    assert all(r["method"] == "none" and r["stored"] and r["computed_tokens"] == r["prompt_tokens"] for r in refused)
    assert any("too little is alike" in reason for reason in blended.summary["not_used"])
    for method in ("none", "prefix", "exact"):
        assert blended.changed("cache", method) == []


def test_exact_over_a_restart_even_of_answers_of_one_token(blended: Ran, tmp_path: Path) -> None:
    """This run's engine holds nothing: what it does not compute came from the folder that the blending run left. A request
    that is over with its first token is stored too."""
    flags = ("--preset", "docs", "--reuse", "exact", "--max-samples", "4", "--max-new-tokens", "1")
    again = _run(tmp_path, *flags, "--cache-dir", str(blended.folder / "kv"))
    held = {record["key"] for record in blended.records() if record["stored"]}
    found = [record for record in again.records() if record["key"] in held]
    fresh = [record for record in again.records() if record["key"] not in held]
    assert found
    assert all(record["method"] == "exact" and record["computed_tokens"] == 1 for record in found)
    assert all(record["bytes_loaded"] for record in found)
    assert fresh
    assert all(record["computed_tokens"] == record["prompt_tokens"] for record in fresh)
    assert again.summary["store_entries"] == blended.summary["store_entries"] + len(fresh)
    assert again.changed("cache") == []


def test_questions_about_pictures_run_where_blend_is_on(tmp_path: Path) -> None:
    """A model that sees takes embeddings for text too, and its keys can be moved; prompts with media are not blended."""
    ran = _run(tmp_path, "--preset", "shapes", "--reuse", "blend", "--max-samples", "4")
    assert {record["method"] for record in ran.records()} <= {"none", "prefix", "exact"}
    assert ran.changed("cache") == []


@pytest.mark.parametrize("name", QUALITIES)
def test_a_quality_means_the_same_to_the_pipeline_and_the_connector(name: BlendQuality) -> None:
    config = SemanticCacheConfig(reuse="blend", blend_quality=name)
    asked = BlendConfig(map=config.blend_map, selector=config.blend.selector, share=config.blend.share)
    assert connector_settings(config).blend_config() == asked
