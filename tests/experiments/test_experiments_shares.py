"""Shares in summaries of dry and live runs, and what cannot be measured."""

from pathlib import Path

import pytest

from dejakv.errors import InputError, ModelError
from dejakv.experiments.estimate import estimate
from dejakv.experiments.run import run
from dejakv.experiments.settings import settings_from


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine to which no model was fetched."""
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path


@pytest.mark.parametrize("mode", ["live", "dry-run"])
def test_a_run_without_the_model_names_the_command(no_model: Path, mode: str) -> None:
    with pytest.raises(ModelError, match="dejakv models get smollm2-135m"):
        run(settings_from("rag", {"max_samples": 2, "cache_mode": mode}, {}))


def test_pictures_and_a_folder_without_a_tokenizer_are_refused(no_model: Path) -> None:
    with pytest.raises(InputError, match="has pictures: name an image-text model"):
        estimate("shapes", "docs-lm")
    (no_model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        estimate("rag", str(no_model))
