"""What compares vLLM with and without the connector, and checks it on a GPU, runs here too, with tiny models."""

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


def test_the_part_with_vllm_of_a_run_for_gpus(tmp_path: Path) -> None:
    """Hits under load and a blend are right, and each way to a first token is measured."""
    command = [sys.executable, "-m", "research.gpu", "--device", "cpu", "--tiny", "--seconds", "3000"]
    command += ["--output", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["left_out"]
    assert all(saw.startswith("right") for name, saw in result["checks"].items() if "vLLM" in name)
    assert sum("vLLM" in name for name in result["checks"]) == 2
    rows = result["figures"]["Time to the first token, vLLM"]
    assert [row["way"] for row in rows] == ["full prefill", "prefix cache", "exact hit", "blend"]
    assert not any("note" in row for row in rows)
    assert all(0 < row["longest step ms"] <= row["ms"] for row in rows)
    assert 0 < rows[3]["recomputed"] < 200
