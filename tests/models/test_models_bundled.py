"""Finding bundled models: names, folders, damage, and what the errors say."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.errors import MissingExtraError, ModelError
from dejakv.models import available, load, path, resolve
from dejakv.models.manifest import MANIFEST, write_manifest


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in place of docs-lm, in an installed distribution of its own."""
    for name in ("docs-lckv", "docs-lm", "shapes-vlm"):
        folder = tmp_path / "dejakv_models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
        write_manifest(folder, "a toy")
    (tmp_path / "dejakv_models" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dejakv_models", raising=False)
    return tmp_path / "dejakv_models" / "docs-lm"


def test_available_lists_name_purpose_and_size(toy: Path) -> None:
    models = {model.name: model for model in available()}
    assert list(models) == ["docs-lckv", "docs-lm", "shapes-vlm"]
    assert (models["docs-lm"].about, models["docs-lm"].nbytes) == ("a toy", 2 + 256 * 40)
    assert path("docs-lm") == resolve("docs-lm") == toy


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match=r"'shapes'.*docs-lm.*smollm2-135m"):
        path("shapes")
    with pytest.raises(ModelError, match=r"unknown model 'docs_lm'.*docs-lm"):
        resolve("docs_lm")


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def changed(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"abc", b"abd", 1))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (truncated, r"model.safetensors is truncated.*reinstall"),
        (changed, r"checksum differs.*reinstall"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "cannot be read"),
    ],
)
def test_a_damaged_model_is_refused_with_the_remedy(damage: Any, cause: str, toy: Path) -> None:
    damage(toy)
    with pytest.raises(ModelError, match=cause):
        resolve("docs-lm")
    if "cannot be read" in cause:
        with pytest.raises(ModelError, match=cause):
            available()


def test_local_folders_need_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path) == tmp_path


def test_every_shipped_model_is_whole_and_small() -> None:
    models = {m.name: m for m in available()}
    assert "shapes-vlm" in models
    limits = {"shapes-vlm": 16e6, "docs-lm": 24e6, "docs-lckv": 24e6}
    for model in models.values():
        files = sum(p.stat().st_size for p in path(model.name).iterdir())
        assert files < limits[model.name]
        assert model.about


def test_loading_damaged_weights_from_a_folder_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(path("shapes-vlm"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 16])
    with pytest.raises(ModelError, match=r"does not load.*complete checkpoint folder.*shapes-vlm"):
        load(folder)


def test_without_the_package_of_models_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.models.table.find_spec", lambda _: None)
    assert available() == []
    for ask in (lambda: resolve("docs-lm"), lambda: load("shapes-vlm")):
        with pytest.raises(MissingExtraError, match=r"extra models.*pip install ./packages/dejakv-models"):
            ask()
    for name in ("docs", "shapes"):
        with pytest.raises(MissingExtraError, match=rf"the data set {name}.*extra models"):
            open_dataset(name, DatasetOptions())
    with pytest.raises(ModelError, match=r"unknown model 'docs_lm'.*docs-lm"):
        resolve("docs_lm")
