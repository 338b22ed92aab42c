"""The script that fills a table on a GPU runs here too, with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_of_tiny_models(tmp_path: Path) -> None:
    """A row for each model and length, of prompts that were computed in full, hit exactly and blended."""
    found = tmp_path / "table.json"
    command = [sys.executable, "-m", "research.vllm_gpu_table", "--small", "--lengths", "1000", "--repeats", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([*command, "--output", str(found)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(found.read_text())["rows"]
    assert [(row["model"], row["tokens"]) for row in rows] == [("mistral-7b-small", 1000), ("llama-3.1-8b-small", 1000)]
    for row in rows:
        assert all(row[f"{name}_ms"] > 0 for name in ("full", "exact", "blend"))
        assert 0 < row["blend_rows"] < 0.5
        assert row["bytes"] == 999 * 2 * 2 * 2 * 32 * 2, "K and V, two layers, two heads of 32, bf16"
    assert done.stdout.count("| mistral-7b-small |") == 1
