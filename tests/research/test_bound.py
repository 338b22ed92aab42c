"""`python -m research.bound` on a small table."""

import json
from pathlib import Path

from research.bound import bound
from research.command import app_of
from typer.testing import CliRunner


def test_sure_hits_are_kept_and_the_bound_is_not_broken(tmp_path: Path) -> None:
    """Half of the hits are sure. Of the others half are wrong, which the plan does not tell."""
    hits = [
        {"wrong": {"first": number % 4 == 0}, "margin": 0.1 if number % 2 == 0 else 3.0, "features": {"share_rows": 0.2}, "computed_tokens": 20,
         "prompt_tokens": 100}
        for number in range(200)
    ]  # fmt: skip
    table = tmp_path / "hits.jsonl"
    table.write_text("".join(json.dumps(hit) + "\n" for hit in hits))
    ran = CliRunner().invoke(app_of(bound), [str(table), "--orders", "20", "--error-bound", "0.1"])
    assert ran.exit_code == 0, ran.output
    fixed, _, plan = (line.split(" | ") for line in ran.output.splitlines()[2:5])
    assert (fixed[2], fixed[3], plan[3]) == ("0.0%", "100.0%", "0.0%")
    assert float(fixed[5].rstrip("%")) > 20
    assert (fixed[6], float(fixed[8].rstrip(" |")) < 0.9) == ("0.00%", True)
    half = ran.output.splitlines()[-1]
    assert half == "| 50% | 1.55 | 0.0% | 0.0% | 70% |"  # the unsure half, beside the 20% of the blends
