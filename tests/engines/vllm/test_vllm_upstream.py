"""The patches that docs/explanation/upstream.md proposes to vLLM: they apply to the installed one, and do what they say in a real engine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_harness import DOCS

HERE = Path(__file__).parent
RUNGS = ("same", "longer", "shorter", "next turn", "exact beginning")
PATCHES = sorted((HERE.parents[2] / "research" / "upstream").glob("*.patch"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed vLLM and all patches: links to its files, and copies of what is changed."""
    folder = tmp_path_factory.mktemp("patched")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(
        Path(spec.origin).parent,
        folder / "vllm",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for patch in PATCHES:
        for line in patch.read_text().splitlines():
            if line.startswith("+++ b/") and (file := folder / line[6:]).is_symlink():
                source = file.resolve()
                file.unlink()
                shutil.copyfile(source, file)
        subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=folder, check=True)
    return folder


def test_the_patched_engine_commits_nothing_that_is_for_one_request(patched: Path) -> None:
    """Wrong state for one request, then a ladder of others: what they find of it, and whether their answers are full computation's. The
    control commits it as exact."""
    assert len(PATCHES) == 2
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(patched), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "patched_program.py"), str(DOCS)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["registered"] == ["LlamaForCausalLM", "KV caches"]

    found = told["found"]
    assert found["wrong"], "the state that the connector supplies changes no answer"
    # wrong state was supplied to the first request; the next one found so many tokens; its answer is right
    assert found["REQUEST_ONLY"] == {rung: [True, 160, True] for rung in RUNGS}
    cached = {"same": 288, "longer": 288, "shorter": 224, "next turn": 320, "exact beginning": 160}
    assert found["EXACT_COMMIT"] == {rung: [True, cached[rung], rung == RUNGS[-1]] for rung in RUNGS}
