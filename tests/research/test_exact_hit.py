"""`python -m research.exact_hit`: three ways to a first token, and whether they agree."""

import json
from pathlib import Path

from research import exact_hit


def test_exact_hit_compares_three_ways(tmp_path: Path) -> None:
    exact_hit.main(["--models", "docs-lm", "--prompts", "2", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())["models"]["docs-lm"]
    assert figures["first_tokens_equal"] == {"own_cache": 2, "exact_hit": 2, "of": 2}
    assert {"full_ms", "own_cache_ms", "exact_hit_ms", "attach_ms"} <= set(figures)
