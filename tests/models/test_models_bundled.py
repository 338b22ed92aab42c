"""Finding bundled models: names, folders, damage, and what the errors say."""

import json
import shutil
from pathlib import Path

import pytest

from dejakv.errors import MissingExtraError, ModelError
from dejakv.models import available, load, path, resolve, tokenizer_folder
from dejakv.models.bundled import MANIFEST, write_manifest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A place with one complete small model folder, as the package has."""
    folder = tmp_path / "models" / "toy-lm"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    write_manifest(folder, "a toy")
    return tmp_path / "models"


def test_available_lists_name_purpose_and_size(root: Path) -> None:
    (model,) = available(root)
    assert (model.name, model.about, model.nbytes) == ("toy-lm", "a toy", 2 + 256 * 40)
    assert path("toy-lm", root) == root / "toy-lm"
    assert resolve("toy-lm", root) == root / "toy-lm"


def test_an_unknown_name_lists_the_known(root: Path) -> None:
    with pytest.raises(ModelError, match=r"'shapes'.*toy-lm"):
        path("shapes", root)
    with pytest.raises(ModelError, match=r"unknown model 'toy_lm'.*toy-lm"):
        resolve("toy_lm", root)


def test_truncated_weights_are_refused(root: Path) -> None:
    weights = root / "toy-lm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors has 10140 bytes instead of 10240.*reinstall"):
        resolve("toy-lm", root)


def test_changed_weights_are_refused_by_checksum(root: Path) -> None:
    weights = root / "toy-lm" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"checksum differs.*reinstall"):
        resolve("toy-lm", root)


def test_a_missing_file_is_named(root: Path) -> None:
    (root / "toy-lm" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        path("toy-lm", root)


def test_an_unreadable_manifest_is_an_error_not_a_crash(root: Path) -> None:
    (root / "toy-lm" / MANIFEST).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        available(root)


def test_local_folders_need_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("missing", ["./nothing", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_path_where_nothing_is(missing: str) -> None:
    with pytest.raises(ModelError, match="no checkpoint at"):
        resolve(missing)


def test_an_empty_name() -> None:
    with pytest.raises(ModelError, match="empty"):
        resolve("  ")


@pytest.mark.parametrize("name", ["llava-hf/llava-1.5-7b-hf", "Qwen/Qwen3-0.6B", "gpt2"])
def test_hub_ids_pass_through(name: str) -> None:
    assert resolve(name) == name


def test_every_shipped_model_is_whole_and_small() -> None:
    models = {m.name: m for m in available()}
    assert "shapes-vlm" in models
    limits = {"shapes-vlm": 16e6, "docs-lm": 24e6, "docs-lckv": 24e6}
    for model in models.values():
        assert path(model.name) == model.folder
        files = sum(p.stat().st_size for p in model.folder.iterdir())
        assert files < limits[model.name]
        assert model.about


def test_loading_damaged_weights_from_a_folder_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(path("shapes-vlm"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 16])
    with pytest.raises(ModelError, match=r"does not load.*complete checkpoint folder.*shapes-vlm"):
        load(folder)


def test_loading_an_unknown_architecture_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ModelError, match="does not load"):
        load(tmp_path)


def test_without_the_package_of_models_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.models.bundled.find_spec", lambda _: None)
    assert available() == []
    for ask in (lambda: resolve("docs-lm"), lambda: load("shapes-vlm"), lambda: tokenizer_folder("smollm2-135m")):
        with pytest.raises(MissingExtraError, match=r"extra models.*pip install ./packages/dejakv-models"):
            ask()
    with pytest.raises(ModelError, match=r"unknown model 'docs_lm'.*docs-lm"):
        resolve("docs_lm")
