"""The comparison of `make workloads` through vLLM: three qualities of blend from one engine, each with its own state."""

import json
from pathlib import Path
from typing import Any

import pytest
from research.workloads.measure import measure
from research.workloads.streams import Stream

from dejakv.blend.settings import QUALITIES
from dejakv.experiments.settings import settings_from
from dejakv.experiments.summary import RunProgress

REQUESTS = 6


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output: Path = tmp_path_factory.mktemp("workloads")
    settings = settings_from("docs", {"dtype": "fp32", "engine": "vllm", "max_samples": 40}, {"min_gain_share": 0.0})
    assert measure(Stream(settings, REQUESTS, (150, 4_000)), output, RunProgress())
    assert not (output / f"docs-vllm-{REQUESTS}" / "state").exists()
    return [json.loads(line) for line in (output / f"docs-vllm-{REQUESTS}" / "samples.jsonl").read_text().splitlines()]


def test_no_arm_has_anothers_state(lines: list[dict[str, Any]]) -> None:
    """The arms that come later in a turn would find the first prompt computed."""
    assert all(arm["computed_tokens"] == arm["prompt_tokens"] for arm in lines[0]["arms"].values())


def test_each_arm_is_blended_at_its_own_quality(lines: list[dict[str, Any]]) -> None:
    computed = {
        name: sum(line["arms"][name]["computed_tokens"] for line in lines if line["arms"][name]["method"] == "blend")
        for name in QUALITIES
    }
    assert computed["strict"] >= computed["default"] >= computed["loose"] > 0
