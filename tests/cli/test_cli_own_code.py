"""Hooks, levels and data sets of the current folder are found by the console script, and defaults that fit the model."""

from pathlib import Path

from tests.services import python

from dejakv.experiments.samples import read_samples
from dejakv.experiments.settings import settings_from

HOOK = """
import numpy as np

def hook(llm, sample):
    return {"own": np.ones(4, dtype=np.float32)}
"""


def test_a_hook_in_the_current_folder(tmp_path: Path) -> None:
    """The console script's own folder is first on its path, and the current one is not on it at all."""
    (tmp_path / "my_hooks.py").write_text(HOOK)
    script = tmp_path / "bin" / "dejakv"
    script.parent.mkdir()
    script.write_text("from dejakv.cli.main import app\napp()\n")
    flags = ["--embedding-layer", "own:4:0.9", "--embedding-hook", "my_hooks:hook", "--max-samples", "3"]
    done = python(script, "run", *flags, "--arms", "cache", "--log-samples", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "embedding:own=" in done.stderr


def test_a_model_without_a_data_set_gets_the_one_of_its_preset() -> None:
    settings = settings_from(None, {"model": "docs-lm", "max_samples": 2}, {})
    assert settings.dataset == "docs"
    assert settings.implied == ("the data set is docs, the one of docs-lm; --dataset names another",)
    assert [sample.media for sample in read_samples(settings)] == [(), ()]
    assert settings_from(None, {"model": "facebook/opt-125m"}, {}).dataset == "gqa"
    assert settings_from(None, {}, {}).dataset == settings_from(None, {"model": "some/other"}, {}).dataset == "shapes"
    assert settings_from(None, {"model": "docs-lm", "dataset": "rag"}, {}).implied == ()
