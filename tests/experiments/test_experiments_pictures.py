"""Pictures that records name by id reach the model and the embedding hook; a missing one is counted in both."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.picture_files import turned

from dejakv.engines.open import open_engine
from dejakv.errors import ModelError
from dejakv.experiments.run import run
from dejakv.experiments.samples import read_samples
from dejakv.experiments.settings import RunSettings, settings_from
from dejakv.vectors.image import ROOT_VARIABLES
from dejakv_models.shapes import ShapesDataset

COUNT = 6


@pytest.fixture(scope="module")
def engine() -> Any:
    settings = settings_from("shapes", {}, {})
    return open_engine(settings, settings.cache)


@pytest.fixture
def gqa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions about shapes as GQA's files have them; no variable names their pictures yet."""
    for name in ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    images = tmp_path / "images"
    images.mkdir()
    records: dict[str, Any] = {}
    for sample in ShapesDataset(seed=0, samples=COUNT, images=8):
        records[sample.id] = {**sample.fields, "question": sample.question, "answer": sample.answer}
        (images / f"{sample.fields['imageId']}.png").write_bytes(sample.media[0].data)
    (tmp_path / "questions.json").write_text(json.dumps(records))
    return tmp_path


def settings(folder: Path, **cache: Any) -> RunSettings:
    run_part = {"dataset": "gqa", "dataset_path": str(folder / "questions.json"), "max_samples": COUNT}
    layers = {"embedding_layers": ["prompt:auto:0.8", "vision:auto:0.99"], "embedding_hook": "prompt_vision"}
    made = settings_from("shapes", run_part, {**layers, **cache})
    return replace(made, arms=("none", "cache"))


@pytest.fixture(scope="module")
def shown(engine: Any) -> list[str]:
    """Answers to the same questions where the data set brings its pictures."""
    result = run(replace(settings(Path()), dataset="shapes", dataset_path=None, arms=("none",)), engine=engine)
    return [row.arms["none"].text for row in result.rows]


def test_a_variable_gives_the_pictures_to_model_and_hook(
    gqa: Path, engine: Any, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROOT_VARIABLES[0], str(gqa / "images"))
    done = run(settings(gqa), engine=engine)
    summary = done.summary
    assert [row.arms["none"].text for row in done.rows] == shown
    assert summary["arms"]["none"]["accuracy"] > 0.8
    assert summary["arms"]["none"]["encoder_runs"] == COUNT
    assert summary["pictures_missing"] == 0
    assert "warning" not in summary
    assert summary["hook_counts"]["vision: ok"] > 0
    assert not any("skip" in name for name in summary["hook_counts"])


@pytest.mark.parametrize("variable", ROOT_VARIABLES)
def test_the_flag_gives_the_same_as_a_variable(gqa: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    flagged = list(read_samples(settings(gqa, image_root=str(gqa / "images"))))
    monkeypatch.setenv(variable, str(gqa / "images"))
    assert list(read_samples(settings(gqa))) == flagged
    assert all(sample.media for sample in flagged)


def test_a_missing_picture_is_a_counted_fallback_in_both(
    gqa: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GQA_IMAGE_ROOT", str(gqa / "images"))
    gone = next(iter(sorted((gqa / "images").iterdir())))
    affected = sum(sample.fields["imageId"] == gone.stem for sample in read_samples(settings(gqa)))
    assert 0 < affected < COUNT
    gone.write_bytes(b"no picture")  # unreadable is as good as missing
    for _ in range(2):
        summary = run(settings(gqa), engine=engine).summary
        assert summary["pictures_missing"] == affected
        assert f"{affected} of {COUNT} questions were asked without the picture" in summary["warning"]
        assert "--image-root" in summary["warning"]
        assert summary["arms"]["none"]["encoder_runs"] == COUNT - affected
        assert summary["hook_counts"]["vision: skip (InputError)"] > 0
        gone.unlink(missing_ok=True)


def test_without_any_folder_the_report_says_that_no_picture_was_shown(gqa: Path, engine: Any) -> None:
    summary = run(settings(gqa), engine=engine).summary
    assert summary["pictures_missing"] == COUNT
    assert (
        "no folder of pictures is named; give --image-root or set SEMANTIC_CACHE_IMAGE_ROOT or GQA_IMAGE_ROOT"
        in summary["warning"]
    )


def test_a_text_model_is_asked_without_pictures_as_the_prototype_did(
    gqa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GQA_IMAGE_ROOT", str(gqa / "images"))
    text = replace(settings(gqa), model="docs-lm")
    assert not any(sample.media for sample in read_samples(text))
    told = replace(text, cache=replace(text.cache, image_root=str(gqa / "images")))
    with pytest.raises(ModelError, match="docs-lm reads only text"):
        run(told)


def test_pictures_are_turned_as_their_exif_data_says(gqa: Path, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    monkeypatch.setenv(ROOT_VARIABLES[0], str(gqa / "images"))
    files = {file: file.read_bytes() for file in (gqa / "images").iterdir()}

    def answers(turn: Callable[[bytes], bytes]) -> list[str]:
        for file, data in files.items():
            file.write_bytes(turn(data))
        rows = run(replace(settings(gqa), arms=("none",)), engine=engine).rows
        return [row.arms["none"].text for row in rows]

    upright = answers(bytes)
    for orientation in (5, 8):
        assert answers(partial(turned, orientation=orientation)) == upright
        assert answers(partial(turned, orientation=orientation, named=False)) != upright
