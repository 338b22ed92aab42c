"""`python -m research.agents`: agents' sessions beside prefix caching."""

import json
from pathlib import Path

import pytest
from research.agents import agents

from dejakv.errors import ConfigError


@pytest.mark.slow
def test_agents_counts_all_requests_beside_prefix_caching_and_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "agents.json"
    agents(output, model="docs-lm", kind=["reminders"], requests=2)
    kinds = json.loads(output.read_text())["kinds"]
    assert list(kinds) == ["reminders"]
    figures = kinds["reminders"]
    assert (figures["requests"], figures["not_run"], figures["bf16_requests"]) == (2, 0, 2)
    # The reminder of the first turn moved: the second turn's text behind it is no prefix, and is blended.
    assert 0 < figures["tokens_by_prefix"] < 1
    assert figures["ttft_by_prefix"] > 0
    for share in ("first_equal", "whole_equal", "whole_equal_bf16"):
        assert figures[share] in (0, 0.5, 1)
    assert "| reminders | 2 |" in capsys.readouterr().out


def test_agents_names_the_kinds_for_an_unknown_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose from sessions, reminders, compaction, subagents"):
        agents(tmp_path / "agents.json", kind=["swarm"])
