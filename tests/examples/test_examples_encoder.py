"""The encoder cache's examples run as they are documented, and say what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=None,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_process_encodes_and_another_answers(tmp_path):
    said = run("encoder_two_processes.py", "--questions", "6", "--folder", str(tmp_path / "outputs"))
    encoded = int(re.search(r"encoder process: (\d+) pictures", said).group(1))
    questions, right, runs, loaded = map(
        int, re.search(r"(\d+) questions, (\d+) right, (\d+) encoder runs, (\d+) from the folder", said).groups()
    )
    assert questions == 6
    assert runs == 0
    assert loaded == encoded > 0
    assert right >= 3, "answers from another process's outputs are those of the model"


def test_agents_encode_each_picture_once():
    said = run("agents_share_pictures.py", "--agents", "3", "--questions", "4")
    pictures = int(re.search(r"(\d+) distinct pictures", said).group(1))
    assert f"without the cache: {3 * 4} encoder runs" in said
    assert f"with the cache:    {pictures} encoder runs" in said
    assert "answers that differ: 0" in said
    assert f"visual_encoder_runs = {pictures}" in said
    assert "--mm-encoder-tp-mode data" in said
