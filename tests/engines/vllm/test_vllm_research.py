"""`python -m research.vllm`, which compares vLLM with and without the connector, runs here too, with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_first_token_of_a_tiny_model(tmp_path: Path) -> None:
    """Prompts that were computed in full, hit exactly and blended."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "research.vllm", "ttft", "--model", "mistral-7b-small", "--lengths", "1000"]
    command += ["--pairs", "1", "--prompts", "1", "--only", "similarity", "--output", str(found)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert report["command"].startswith("python -m research.vllm ttft --model mistral-7b-small")
    (row,) = report["rows"]
    assert (row["selector"], row["tokens"], row["prompts"]) == ("similarity", 1000, 1)
    assert all(row[f"{name}_ms"] > 0 for name in ("full", "exact", "blend", "full_stall", "exact_stall"))
    assert 0 < row["blend_rows"] < 0.5
    assert row["bytes"] == 999 * 2 * 2 * 2 * 32 * 2, "K and V, two layers, two heads of 32, bf16"
